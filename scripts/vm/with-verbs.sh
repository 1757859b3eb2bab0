#!/usr/bin/env bash
# In the guest: runs a program with the libibverbs of a folder (fetch-verbs.sh), its providers, and the C library that they need.
# usage: with-verbs.sh FOLDER PROGRAM ARGUMENTS...
set -u
libraries=$1/usr/lib/x86_64-linux-gnu
shift
# libibverbs looks for providers at one place, for those that are named at another. The guest has one of soft-RoCE's.
mount --bind "$libraries/libibverbs" /usr/lib/x86_64-linux-gnu/libibverbs && mkdir /run/providers && echo 'driver rxe' >/run/providers/rxe.driver \
    && mount --bind /run/providers /etc/libibverbs.d || exit 70
# What the program needs besides, as libgcc, is this machine's.
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries:/usr/lib/x86_64-linux-gnu" "$@"
