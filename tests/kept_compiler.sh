#!/bin/sh
# The `g++` of the tests. Bloomery compiles its C++ once per cache folder, and the caches of many tests begin empty: what
# one of them has compiled is kept in $BLOOMERY_TESTS_COMPILED, by its source and options, for those after it.
compiler=$BLOOMERY_TESTS_COMPILER
case "$*" in
    *" -x c++ - -o "*) ;;
    *) exec "$compiler" "$@" ;;
esac
for library; do :; done # the last word
source=$(mktemp "$BLOOMERY_TESTS_COMPILED/source-XXXXXXXX") || exec "$compiler" "$@"
trap 'rm -f "$source" "$source.so"' EXIT
cat >"$source"
options=${*%"$library"}
kept=$BLOOMERY_TESTS_COMPILED/$( (echo "$options" && cat "$source") | sha256sum | cut -c 1-32).so
if [ ! -f "$kept" ]; then
    "$compiler" "$@" <"$source" || exit
    cp "$library" "$source.so" && mv "$source.so" "$kept"
else
    cp "$kept" "$library"
fi
