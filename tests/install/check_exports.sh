#!/usr/bin/env bash
# check_exports.sh PREFIX LIBRARY: the shared library exports the public interface under its version
# and nothing else, asks for no Python or PyTorch, and carries its ABI version in its name.
set -euo pipefail
prefix=$1 library=$2
fail() { printf 'error: %s\n' "$*" >&2 && exit 1; }
version() { sed -nE "s/^#define MLA_VERSION_$1 ([0-9]+).*/\1/p" "$prefix/include/mla/version.hpp"; }
abi=$(version MAJOR).$(version MINOR)

exported=$(nm -D --defined-only "$library" | awk '$2 != "A" {print $3}')
strangers=$(grep -vE "@@MLA_$abi\$" <<<"$exported" || true)
[ -z "$strangers" ] || fail "exported without the version MLA_$abi: $strangers"
strangers=$(sed "s/@@MLA_$abi\$//" <<<"$exported" | c++filt |
  grep -vE '^(mla_[a-z0-9_]+$|mla::|typeinfo( name)? for mla::|vtable for mla::)' || true)
[ -z "$strangers" ] || fail "not part of the interface: $strangers"
# The public namespace is mla alone. Of those inside it only what is marked for mla::layer, the tool, and
# what public headers inline.
shared='cpu::measure_limits|cpu::measure_fma_gflops|cuda::check|cuda::describe_cards?|device::find_runtime|device::runtime_of|detail::throw_missing'
strangers=$(sed "s/@@MLA_$abi\$//" <<<"$exported" | c++filt |
  grep -E '^(typeinfo( name)? for |vtable for )?mla::[a-z0-9_]+::' |
  grep -vE "^mla::($shared)\(" || true)
[ -z "$strangers" ] || fail "internal, and exported: $strangers"

declared=$(cpp -std=c99 -P -I "$prefix/include" <<<'#include "mla/mla_engine.h"' |
  tr '\n' ' ' | grep -oE '\bmla_[a-z0-9_]+ ?\(' | tr -d ' (' | sort -u)
[ "$(wc -l <<<"$declared")" -gt 70 ] || fail "the C headers declare only: $declared"
missing=$(comm -23 <(echo "$declared") <(sed 's/@@.*//' <<<"$exported" | sort))
[ -z "$missing" ] || fail "declared by a C header and not exported: $missing"

foreign=$(nm -D --undefined-only "$library" | c++filt | grep -E '\b_?Py[A-Z_]|torch|c10::|at::' || true)
[ -z "$foreign" ] || fail "asks for Python or PyTorch: $foreign"
readelf -d "$library" | grep -q "SONAME.*\[libmla\.so\.$abi\]" || fail "SONAME is not libmla.so.$abi"
echo "$(wc -l <<<"$exported") symbols, all MLA_$abi"
