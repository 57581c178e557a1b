#pragma once

// The whole public C++ interface.
#include "mla/attention.hpp"
#include "mla/batch.hpp"
#include "mla/device.hpp"
#include "mla/dtype.hpp"
#include "mla/error.hpp"
#include "mla/executor.hpp"
#include "mla/geometry.hpp"
#include "mla/kv_resource.hpp"
#include "mla/merge.hpp"
#include "mla/page_key.hpp"
#include "mla/pool.hpp"
#include "mla/reference.hpp"
#include "mla/supports.hpp"
#include "mla/tensor_view.hpp"
#include "mla/version.hpp"
