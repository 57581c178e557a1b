#!/usr/bin/env bash
# run.sh static|shared|subfolder SOURCE WORK CXX CC: builds libmla as a user would, then a project
# that uses it, and runs that. Stops at the first thing that is wrong.
set -euo pipefail
flavour=$1 source=$2 work=$3 cxx=$4 cc=$5
here=$source/tests/install
jobs=${JOBS:-$(nproc)}
step() { printf -- '-- %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2 && exit 1; }
configure() {
  cmake -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_C_COMPILER="$cc" \
    "$@" >"$work/configure.log" 2>&1 || { cat "$work/configure.log" && false; }
}
export CXXFLAGS="" CFLAGS="" LDFLAGS=""

# Objects stay from run to run; what is installed and what uses it is made anew.
mkdir -p "$work"
rm -rf "$work/prefix" "$work/moved" "$work/consumer" "$work/other-version"

if [ "$flavour" = subfolder ]; then
  step "a project with libmla as a subfolder"
  # A debug build, which compiles several times as fast.
  configure -S "$here/consumer" -B "$work/consumer" -DMLA_SOURCE="$source" -DCMAKE_BUILD_TYPE=Debug
  cmake --build "$work/consumer" -j"$jobs"
  "$work/consumer/consumer"
  "$work/consumer/layer_consumer"
  exit 0
fi

step "build and install, $flavour"
[ "$flavour" = shared ] && shared=ON || shared=OFF
configure -S "$source" -B "$work" -DBUILD_SHARED_LIBS=$shared -DMLA_BUILD_TESTS=OFF \
  -DMLA_BUILD_BENCH=OFF -DMLA_BUILD_EXAMPLES=OFF
cmake --build "$work" -j"$jobs"
cmake --install "$work" --prefix "$work/prefix" >/dev/null
mv "$work/prefix" "$work/moved"  # an install tree can be moved
prefix=$work/moved
libdir=$(dirname "$(find "$prefix" -name 'libmla.*' | head -1)")

step "headers ask for nothing that is not installed"
if grep -rnE '#include [<"](hwy|fmt|nlohmann|CLI|src)/' "$prefix/include"; then
  fail "an installed header needs another project's"
fi

step "find_package"
configure -S "$here/consumer" -B "$work/consumer" -DCMAKE_PREFIX_PATH="$prefix"
cmake --build "$work/consumer"
"$work/consumer/consumer"
"$work/consumer/layer_consumer"
if cmake -S "$here/consumer" -B "$work/other-version" -DCMAKE_PREFIX_PATH="$prefix" \
  -DMLA_WANTED=9.0 >"$work/version.log" 2>&1; then
  fail "find_package(mla 9.0) found another version"
fi
grep -q 'requested version "9.0"' "$work/version.log" || { cat "$work/version.log" && false; }

step "pkg-config, C++ and C99"
export PKG_CONFIG_PATH=$libdir/pkgconfig
[ "$flavour" = shared ] && static=() || static=(--static)
flags=($(pkg-config --cflags --libs "${static[@]}" mla) -Wl,-rpath,"$libdir")
"$cxx" -std=c++20 "$here/consumer/main.cpp" -o "$work/with_pkg_config" "${flags[@]}"
"$work/with_pkg_config"
"$cxx" -std=c++20 "$here/consumer/layer.cpp" -o "$work/layer_with_pkg_config" \
  $(pkg-config --cflags --libs "${static[@]}" mla_layer) -Wl,-rpath,"$libdir"
"$work/layer_with_pkg_config"
for program in capi_test capi_engine_test; do
  "$cc" -std=c99 -pedantic -Wall -Wextra -Werror "$source/tests/capi/$program.c" -o "$work/c99" \
    "${flags[@]}" -lm
  "$work/c99"
done

step "the installed tool"
"$prefix/bin/mla" --version

if [ "$flavour" = shared ]; then
  step "exports"
  "$here/check_exports.sh" "$prefix" "$libdir/libmla.so"
  step "Python, through the C interface"
  python3 - "$libdir/libmla.so" <<'PYTHON'
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.mla_last_error.restype = library.mla_version.restype = ctypes.c_char_p
assert library.mla_abi_version() == 2
assert library.mla_executor_create(-1, ctypes.byref(ctypes.c_void_p())) == 1
step = ctypes.c_void_p()
assert library.mla_step_create(ctypes.byref(step)) == 0
assert library.mla_kv_resource_drop_prefixes(step) == 1  # another handle
assert b"a living mla_kv_resource" in library.mla_last_error()
library.mla_step_destroy(step)
print("python", sys.version.split()[0], library.mla_version().decode(), library.mla_last_error().decode())
PYTHON
fi
