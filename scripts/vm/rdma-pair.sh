# shellcheck shell=bash
# In the guest, for `source`: makes two soft-RoCE devices with a switch between them, so that packets cross a link that can lose them, and go down.
#
#   rxe0 on rnic0, 10.9.0.1  --veth--  port0 [switch0] port1  --veth--  rnic1, 10.9.0.2, rxe1
#
# Packets to one of this machine's own addresses stay in the machine, unless routing rules say otherwise. Packets that come in from a device are for
# this machine (pref 10); packets to either address leave by the other address's device (pref 20); then follows the rule that the kernel normally has
# first.
for module in ib_uverbs rdma_ucm rdma_rxe veth bridge sch_netem; do
    modprobe "$module" || return 1
done
ip link set lo up
ip link add switch0 type bridge && ip link set switch0 mtu 4200 up || return 1
# No port waits for a spanning tree; each end keeps its neighbour's address.
ip link set switch0 type bridge stp_state 0 forward_delay 0 || return 1
for end in 0 1; do
    ip link add "rnic$end" type veth peer name "port$end" || return 1
    ip link set "rnic$end" mtu 4200 up && ip link set "port$end" mtu 4200 master switch0 up || return 1
    ip addr add "10.9.0.$((end + 1))/32" dev "rnic$end" || return 1
    ip rule add pref 10 iif "rnic$end" lookup local || return 1
done
for end in 0 1; do
    ip route add "10.9.0.$((2 - end))/32" dev "rnic$end" src "10.9.0.$((end + 1))" table "$((100 + end))" || return 1
    ip rule add pref 20 to "10.9.0.$((2 - end))" lookup "$((100 + end))" || return 1
    rdma link add "rxe$end" type rxe netdev "rnic$end" || return 1
done
ip rule add pref 30 lookup local && ip rule del pref 0 || return 1
