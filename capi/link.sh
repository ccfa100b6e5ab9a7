#!/bin/sh
# Links the shared library with versioned symbols: capi/link.sh ARCHIVE OUTPUT, where ARCHIVE is the static library.
#
# rustc passes a version script of its own to the linker, beside which linkers take no second one. So the library that Cargo
# links has no versions, and a distribution links the archive once more.
set -eu
here=$(dirname "$0")
${CC:-cc} -shared -o "$2" -Wl,-soname,libuzone.so.0.1 -Wl,--version-script="$here/uzone.map" -Wl,--gc-sections \
    -Wl,--whole-archive "$1" -Wl,--no-whole-archive -lgcc_s -lpthread -lm -ldl -lc
