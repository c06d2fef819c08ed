# Runs the field's own tools, none of them ours, on the lab's InfiniBand fabric of four ports and three switches.
# What each says is kept in the directory $1 as NAME.out, its exit status as NAME.status. Then come faults, by the
# module's files in debugfs, and $2 malformed management datagrams, sent by the Python $3.
here=$(dirname "$0")
cd "$1" || exit 1
debug=/sys/kernel/debug/softib
leaf_2=0x5254000000020021
mgid=ff12:4001:ffff::f01:107 # of 239.1.1.7 for PS_UDP

kept() { # name, command
    kept=$1
    shift
    "$@" >"$kept.out" 2>&1
    echo $? >"$kept.status"
    echo "$kept"
}

finished() { # name, ports: how many receivers have all that they want
    count=0
    for port in $2; do [ ! -e "$1.$port.status" ] || count=$((count + 1)); done
    echo "$count"
}

passes() { # name, the receivers' ports, how many these are, the sender's port and options
    for port in $2; do
        (kept "$1.$port" mckey -m 239.1.1.7 -b "10.77.0.$port" -C 100 -S 512) &
    done
    until [ "$(saquery -C softib1 --smkey 1 -m | grep -c "$mgid")" = "$3" ]; do sleep 0.05; done
    kept "$1.route" ibroute -M -G "$leaf_2"
    # They attach a moment after they became members: there are messages until all have enough.
    until [ "$(finished "$1" "$2")" = "$3" ]; do
        kept "$1.sender" mckey -s $5 -m 239.1.1.7 -b "10.77.0.$4" -C 100 -S 512
    done
}

kept ibstat ibstat softib2
kept ibnetdiscover ibnetdiscover
kept saquery saquery -g
kept ibroute ibroute -M -G "$leaf_2"
kept nodeinfo smpquery nodeinfo -D 0,1
kept switchinfo smpquery switchinfo -D 0,1
kept portinfo smpquery portinfo -D 0,1,2 1
kept no_such_port smpquery portinfo -D 0,1 9
kept before.2 perfquery -x -G 0x5254000000010011 1
kept before.4 perfquery -x -G 0x5254000000010031 1
passes forth "2 3" 2 1
kept after.2 perfquery -x -G 0x5254000000010011 1
kept after.4 perfquery -x -G 0x5254000000010031 1
passes back 1 1 2 -o
kept reset perfquery -x -R -G 0x5254000000010011 1
kept cleared perfquery -x -G 0x5254000000010011 1

state() { cut -d: -f1 "/sys/class/infiniband/$1/ports/1/state"; }
known() { saquery -C softib1 NR | grep -c "NodeDescription.*softib[0-9]"; }
echo "softib4 out" >"$debug/links"
kept unplugged ibstat softib4
until [ "$(known)" = 3 ]; do sleep 0.05; done # the switch's trap has told OpenSM
echo "softib4 in" >"$debug/links"
until [ "$(state softib4)" = 4 ] && [ "$(known)" = 4 ]; do sleep 0.05; done
kept plugged ibstat softib4
echo "switch0/2 out" >"$debug/links"
until [ "$(known)" = 2 ]; do sleep 0.05; done
kept cut cat "$debug/links"
echo "switch0/2 in" >"$debug/links"
until [ "$(known)" = 4 ] && [ "$(state softib2)$(state softib4)" = 44 ]; do sleep 0.05; done
for line in "softib5 out" "softib0 out" "switch3/1 out" "switch0/9 in" "softib1 away" "nothing" ""; do
    echo "$line" >"$debug/links" || echo "refused: $line"
done >refused.txt 2>/dev/null
echo "softib3 2" >"$debug/drop"
kept dropping sh -c 'for i in 1 2 3 4 5 6 7 8; do smpquery -t 100 nodeinfo -G 0x5254000000010021; done'
echo "softib3 0" >"$debug/drop"
kept dropped perfquery -G 0x5254000000010021 1

kept storm "$3" "$here/smp_storm.py" softib2 "$2" 1
for port in 1 2 3 4; do ip link set "ib$port" down; done
rmmod ib_ipoib
kill "$(pidof opensm)"
while pidof opensm >/dev/null; do sleep 0.05; done
kept unload rmmod softib
kept log dmesg
