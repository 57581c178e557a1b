// The functions of oneDNN that the layer's products on the CPU call, each found in the installed
// library when it is first called: the module loads, and all but such a layer works, where there is
// none. The library is that of the headers, of their major version.
#include <dlfcn.h>
#include <dnnl.h>

#include <string>

#include "mla/error.hpp"

namespace {

#define MLA_TEXT_OF(number) #number
#define MLA_TEXT(number) MLA_TEXT_OF(number)
constexpr const char* kLibrary = "libdnnl.so." MLA_TEXT(DNNL_VERSION_MAJOR);

void* find(const char* name) {
  static void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  // Its own dependencies are searched too: libgomp.
  void* function = library == nullptr ? nullptr : dlsym(library, name);
  if (function == nullptr) {
    const char* text = dlerror();
    mla::throw_state({"oneDNN", "Layer", std::string(kLibrary) + " of this system, for the CPU",
                      text == nullptr ? name : text});
  }
  return function;
}

}  // namespace

extern "C" {
int omp_get_max_threads();
void omp_set_num_threads(int num_threads);

#define MLA_FORWARD(result, name, parameters, arguments)                           \
  result name parameters {                                                         \
    static const auto function = reinterpret_cast<decltype(&(name))>(find(#name)); \
    return function arguments;                                                     \
  }

MLA_FORWARD(int, omp_get_max_threads, (), ())
MLA_FORWARD(void, omp_set_num_threads, (int num_threads), (num_threads))
MLA_FORWARD(dnnl_status_t, dnnl_engine_create,
            (dnnl_engine_t * engine, dnnl_engine_kind_t kind, size_t index), (engine, kind, index))
MLA_FORWARD(dnnl_status_t, dnnl_engine_destroy, (dnnl_engine_t engine), (engine))
MLA_FORWARD(dnnl_status_t, dnnl_stream_create,
            (dnnl_stream_t * stream, dnnl_engine_t engine, unsigned flags), (stream, engine, flags))
MLA_FORWARD(dnnl_status_t, dnnl_stream_wait, (dnnl_stream_t stream), (stream))
MLA_FORWARD(dnnl_status_t, dnnl_stream_destroy, (dnnl_stream_t stream), (stream))
MLA_FORWARD(dnnl_status_t, dnnl_memory_desc_init_by_strides,
            (dnnl_memory_desc_t * desc, int ndims, const dnnl_dims_t dims, dnnl_data_type_t type,
             const dnnl_dims_t strides),
            (desc, ndims, dims, type, strides))
MLA_FORWARD(dnnl_status_t, dnnl_memory_create,
            (dnnl_memory_t * memory, const dnnl_memory_desc_t* desc, dnnl_engine_t engine,
             void* handle),
            (memory, desc, engine, handle))
MLA_FORWARD(dnnl_status_t, dnnl_memory_destroy, (dnnl_memory_t memory), (memory))
MLA_FORWARD(dnnl_status_t, dnnl_matmul_desc_init,
            (dnnl_matmul_desc_t * desc, const dnnl_memory_desc_t* src,
             const dnnl_memory_desc_t* weights, const dnnl_memory_desc_t* bias,
             const dnnl_memory_desc_t* dst),
            (desc, src, weights, bias, dst))
MLA_FORWARD(dnnl_status_t, dnnl_primitive_desc_iterator_create,
            (dnnl_primitive_desc_iterator_t * iterator, const_dnnl_op_desc_t desc,
             const_dnnl_primitive_attr_t attributes, dnnl_engine_t engine,
             const_dnnl_primitive_desc_t hint),
            (iterator, desc, attributes, engine, hint))
MLA_FORWARD(dnnl_primitive_desc_t, dnnl_primitive_desc_iterator_fetch,
            (const_dnnl_primitive_desc_iterator_t iterator), (iterator))
MLA_FORWARD(dnnl_status_t, dnnl_primitive_desc_iterator_destroy,
            (dnnl_primitive_desc_iterator_t iterator), (iterator))
MLA_FORWARD(dnnl_status_t, dnnl_primitive_desc_destroy, (dnnl_primitive_desc_t desc), (desc))
MLA_FORWARD(dnnl_status_t, dnnl_primitive_create,
            (dnnl_primitive_t * primitive, const_dnnl_primitive_desc_t desc), (primitive, desc))
MLA_FORWARD(dnnl_status_t, dnnl_primitive_execute,
            (const_dnnl_primitive_t primitive, dnnl_stream_t stream, int num_arguments,
             const dnnl_exec_arg_t* arguments),
            (primitive, stream, num_arguments, arguments))
MLA_FORWARD(dnnl_status_t, dnnl_primitive_destroy, (dnnl_primitive_t primitive), (primitive))
}
