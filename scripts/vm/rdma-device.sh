# shellcheck shell=bash
# In the guest, for `source`: makes a soft-RoCE device rxe0 on a dummy interface with addresses 10.9.0.1 and 10.9.0.2. GID 1 is RoCE v2 of the first;
# Ethernet frames of 4200 bytes have room for a path MTU of 4096.
for module in ib_uverbs rdma_ucm rdma_rxe dummy; do
    modprobe "$module" || return 1
done
ip link set lo up
ip link add rnic0 type dummy && ip link set rnic0 mtu 4200 up || return 1
ip addr add 10.9.0.1/24 dev rnic0 && ip addr add 10.9.0.2/24 dev rnic0 || return 1
rdma link add rxe0 type rxe netdev rnic0 || return 1
