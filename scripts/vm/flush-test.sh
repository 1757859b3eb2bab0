#!/usr/bin/env bash
# FLUSH by an RNIC, as a part of scripts/test.sh: rdma-test.sh -l without durable_rpc, which takes several times as long.
# usage: flush-test.sh            Last line: N passed, N failed. Exit status as rdma-test.sh.
exec "$(dirname "$0")/rdma-test.sh" -l rdma_semantics
