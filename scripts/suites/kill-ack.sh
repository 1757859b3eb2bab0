#!/usr/bin/env bash
# The kill suite, on a server whose answers are all durable.
# usage: kill-ack.sh [shm|tcp|unix]      with the variables of kill.sh
CUTTLEFS_DURABILITY=ack exec "$(dirname "$0")/kill.sh" "$@"
