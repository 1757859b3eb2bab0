#!/usr/bin/env bash
# The kill suite on a server whose every answer is durable.
# usage: kill-ack.sh [shm|tcp|unix]      and the variables of kill.sh
CUTTLEFS_DURABILITY=ack exec "$(dirname "$0")/kill.sh" "$@"
