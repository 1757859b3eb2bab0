#!/usr/bin/env bash
# The kill suite on a server that acknowledges small writes before it has executed them (rings on emulated persistent
# memory, which outlive a killed process).
# usage: kill-early.sh [shm|tcp|unix]      and the variables of kill.sh; CUTTLEFS_EARLY: the kind of durable RPC (wflush)
CUTTLEFS_DURABILITY=ack CUTTLEFS_EARLY=${CUTTLEFS_EARLY:-wflush} exec "$(dirname "$0")/kill.sh" "$@"
