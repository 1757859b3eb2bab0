#!/usr/bin/env bash
# Runs in the guest: starts a program with the libibverbs of a directory (fetch-verbs.sh), its providers, and the C library that they need.
# usage: with-verbs.sh FOLDER PROGRAM ARGUMENTS...
set -u
libraries=$1/usr/lib/x86_64-linux-gnu
shift
# libibverbs looks for its default providers in one place, and for named ones in another. The guest has a provider for soft-RoCE. Once a guest.
if [[ ! -d /run/providers ]]; then
    mount --bind "$libraries/libibverbs" /usr/lib/x86_64-linux-gnu/libibverbs && mkdir /run/providers && echo 'driver rxe' >/run/providers/rxe.driver \
        && mount --bind /run/providers /etc/libibverbs.d || exit 70
fi
# Other libraries of the program, such as libgcc, are this machine's.
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries:/usr/lib/x86_64-linux-gnu" "$@"
