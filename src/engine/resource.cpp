#include "mla/resource.hpp"

namespace mla {

Resource::~Resource() = default;

AdmitResult Resource::admit(const Step& /*step*/) { return {}; }

AdmitResult Resource::pre_admit(const Step& /*step*/) { return {}; }

}  // namespace mla
