#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#
# Multicast on Soft-RoCE: which members are announced and receive, and what a leave leaves behind.
#
# Three rxe devices stand on ports of a bridge that snoops IGMP. What a membership does is read where it must
# show: in the host's IGMP list, in the bridge's table and in the devices' packet counters. mckey (rdma-core)
# joins, sends and receives.
#
# For tools/testing/selftests/rdma. The output is KTAP; the status is 4 where the test cannot run.

GROUP=239.66.7.1
IGMP_NAME=010742EF # of GROUP, as /proc/net/igmp writes it
NET=198.18.66
COUNT=10
# Before its fix mckey destroys its QP before all is sent, and on 6.12 few messages or none leave.
MCKEY=${MCKEY:-mckey}
PATIENCE=300 # tenths of a second for what takes milliseconds

skip() {
	echo "1..0 # SKIP $1"
	exit 4
}

[ "$(id -u)" = 0 ] || skip "not root"
for tool in ip rdma bridge "$MCKEY"; do
	command -v "$tool" >/dev/null || skip "no $tool"
done
modprobe -aq rdma_rxe rdma_ucm ib_uverbs veth bridge
[ -e /dev/infiniband/rdma_cm ] || skip "no rdma_ucm"

declare -A saved
cleanup() {
	local at

	kill -KILL $(jobs -p) 2>/dev/null
	wait 2>/dev/null
	for at in 1 2 3; do
		rdma link delete "rxm$at" 2>/dev/null
		ip link delete "vm$at" 2>/dev/null
	done
	ip link delete brm 2>/dev/null
	for at in "${!saved[@]}"; do
		echo "${saved[$at]}" >"$at"
	done
}
trap cleanup EXIT

sysctl_for_now() { # path, value
	saved[$1]=$(cat "$1")
	echo "$2" >"$1"
}

make_fabric() {
	local at conf=/proc/sys/net/ipv4/conf

	# Ports of one host hear each other only if packets with a local source are taken.
	sysctl_for_now $conf/all/rp_filter 0
	ip link add brm type bridge mcast_snooping 1 mcast_query_response_interval 1 \
		mcast_last_member_interval 10 || return
	ip link set brm up
	ip link set brm type bridge mcast_querier 1
	# Short until the querier counts as one; so short for hosts it would mean IGMPv1, which has no leave.
	ip link set brm type bridge mcast_query_response_interval 1000
	for at in 1 2 3; do
		ip link add "vm$at" type veth peer name "pm$at" || return
		ip link set "pm$at" master brm up
		ip addr add "$NET.$at/24" dev "vm$at"
		echo 1 >"$conf/vm$at/accept_local"
		echo 0 >"$conf/vm$at/rp_filter"
		ip link set "vm$at" up
		rdma link add "rxm$at" type rxe netdev "vm$at" || return
	done
}

until_true() { # a command, which is tried until it succeeds
	local tries

	for ((tries = 0; tries < PATIENCE; tries++)); do
		"$@" && return
		sleep 0.1
	done
	echo "# not in time: $*"
	return 1
}

announced() { # port: the host's IGMP list has the group, and the bridge's table has the port
	awk -v dev="vm$1" -v name=$IGMP_NAME '
		/^[0-9]/ { here = $2 == dev } here && $1 == name { found = 1 } END { exit !found }
	' /proc/net/igmp && bridge mdb show | grep -q "port pm$1 grp $GROUP "
}

not_announced() { # port: in neither of them
	! awk -v dev="vm$1" -v name=$IGMP_NAME '
		/^[0-9]/ { here = $2 == dev } here && $1 == name { found = 1 } END { exit !found }
	' /proc/net/igmp && ! bridge mdb show | grep -q "port pm$1 grp $GROUP "
}

listen() { # port: a member that ends when it has received COUNT messages
	timeout 60 "$MCKEY" -m $GROUP -b "$NET.$1" -C $COUNT >/dev/null &
}

send_all() { # port and options: mckey sends COUNT messages, after a pause
	local port=$1

	shift
	timeout 60 "$MCKEY" -s -m $GROUP -b "$NET.$port" -C $COUNT "$@" >/dev/null
}

received() { # the packets that a device has taken
	rdma statistic show link "rxm$1/1" | grep -o 'rcvd_pkts [0-9]*' | cut -d' ' -f2
}

# --- tests; each leaves no member behind --------------------------------------------------------

a_full_member_is_announced() {
	local member

	listen 2
	member=$!
	until_true announced 2 && not_announced 1 && not_announced 3 || return
	send_all 1 && wait $member
}

a_member_that_ends_is_announced_no_more() {
	until_true not_announced 2
}

each_member_receives_all_messages() {
	local first second

	listen 2
	first=$!
	listen 3
	second=$!
	until_true announced 2 && until_true announced 3 && send_all 1 && wait $first && wait $second
}

two_members_of_one_device_receive_all_messages() {
	local first second

	listen 2
	first=$!
	listen 2
	second=$!
	until_true announced 2 || return
	# The list counts both as one: give the second the time that the sender's own pause gives.
	send_all 1 && wait $first && wait $second
}

a_port_without_a_member_receives_nothing() {
	local member before

	until_true not_announced 3 || return
	listen 2
	member=$!
	until_true announced 2 || return
	before=$(received 3)
	send_all 1 && wait $member || return
	[ "$(received 3)" = "$before" ]
}

a_send_only_member_sends_and_is_not_announced() {
	local member sender result=0

	listen 2
	member=$!
	until_true announced 2 || return
	send_all 1 -o &
	sender=$!
	while kill -0 $sender 2>/dev/null; do
		not_announced 1 || result=1
		sleep 0.1
	done
	wait $sender && wait $member && return $result
}

a_killed_member_has_left() {
	local member

	listen 2
	member=$!
	until_true announced 2 || return
	pkill -KILL -P $member # mckey, below timeout
	until_true not_announced 2
}

a_device_without_members_can_be_deleted() {
	timeout 30 rdma link delete rxm3 && ! rdma link show rxm3/1 >/dev/null 2>&1
}

# ------------------------------------------------------------------------------------------------

TESTS="a_full_member_is_announced a_member_that_ends_is_announced_no_more
each_member_receives_all_messages two_members_of_one_device_receive_all_messages
a_port_without_a_member_receives_nothing a_send_only_member_sends_and_is_not_announced
a_killed_member_has_left a_device_without_members_can_be_deleted"

echo "TAP version 13"
make_fabric || skip "rxe devices on veth pairs cannot be made"
set -- $TESTS
echo "1..$#"
number=0 failed=0
for test; do
	number=$((number + 1))
	if $test; then
		echo "ok $number $test"
	else
		echo "not ok $number $test"
		failed=1
	fi
	kill -KILL $(jobs -p) 2>/dev/null
	wait 2>/dev/null
done
exit $failed
