# Runs the field's own tools, none of them ours, on the lab's InfiniBand fabric of four ports and three switches.
# What each says is kept in the directory $1 as NAME.out, its exit status as NAME.status. Then come faults, by the
# module's files in debugfs, $2 malformed management datagrams, sent by the Python $3, $4 lives of queue pairs,
# and $5 groups that each of $6 processes joins.
here=$(dirname "$0")
cd "$1" || exit 1
debug=/sys/kernel/debug/softib
leaf_2=0x5254000000020021
mgid=ff12:4001:ffff::f01:107 # of 239.1.1.7 for PS_UDP
broadcast=ff12:401b:ffff::ffff:ffff # of the IPoIB interfaces
late_mgid=ff12:4001:ffff::f01:108 # of 239.1.1.8

kept() { # name, command; what this writes to 3 is not kept: it tells the lab that a long one does not hang
    kept=$1
    shift
    "$@" 3>&1 >"$kept.out" 2>&1
    echo $? >"$kept.status"
    echo "$kept"
}

pause() { sleep 0.3; } # between two questions by a tool, which an emulated processor needs longer to start

finished() { # name, ports: how many receivers have all that they want
    count=0
    for port in $2; do [ ! -e "$1.$port.status" ] || count=$((count + 1)); done
    echo "$count"
}

passes() { # name, the receivers' ports, how many these are, the sender's port and options
    for port in $2; do
        (kept "$1.$port" mckey -m 239.1.1.7 -b "10.77.0.$port" -C 100 -S 512) &
    done
    until [ "$(saquery -C softib1 --smkey 1 -m | grep -c "$mgid")" = "$3" ]; do pause; done
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
cat "$debug/tap" >tap.pcapng &
tap=$!
until [ -s tap.pcapng ]; do sleep 0.05; done
cat "$debug/tap" >/dev/null 2>second_reader.txt
passes forth "2 3" 2 1
# A message's MGID stands before its BTH, whose first byte says: with an immediate.
until [ "$(LC_ALL=C grep -aoP "\xff\x12\x40\x01\xff\xff\x00{6}\x0f\x01\x01\x07\x65" tap.pcapng | wc -l)" -ge 300 ]; do
    sleep 0.05
done
kill "$tap"
kept after.2 perfquery -x -G 0x5254000000010011 1
kept after.4 perfquery -x -G 0x5254000000010031 1
passes back 1 1 2 -o
kept reset perfquery -x -R -G 0x5254000000010011 1
kept cleared perfquery -x -G 0x5254000000010011 1

# Switch 2 gets its entry, and does not use it yet: its two HCAs are members, and hear nothing.
echo "switch2 hold" >"$debug/tables"
kept held.tables cat "$debug/tables"
for port in 2 4; do (kept "late.$port" mckey -m 239.1.1.8 -b "10.77.0.$port" -C 3 -S 64) & done
until mlid=$(saquery -C softib1 -g | sed -n "/$late_mgid/{n;s/.*Mlid\.*//p}") && [ -n "$mlid" ] &&
    ibroute -M -G "$leaf_2" | grep -qi "^$mlid .*x"; do pause; done
until [ "$(grep -c "^softib[24] .*:0f01:0108 " "$debug/attached")" = 2 ]; do sleep 0.05; done
kept held.before perfquery -x -G 0x5254000000010031 1
kept held.sender mckey -s -m 239.1.1.8 -b 10.77.0.1 -C 200 -S 64
kept held.after perfquery -x -G 0x5254000000010031 1
[ "$(finished late "2 4")" = 0 ] && echo "nothing was heard" >held.txt
echo "switch2 0" >"$debug/tables"
until [ "$(finished late "2 4")" = 2 ]; do kept late.sender mckey -s -m 239.1.1.8 -b 10.77.0.1 -C 3 -S 64; done

state() { cut -d: -f1 "/sys/class/infiniband/$1/ports/1/state"; }
known() { saquery -C softib1 NR | grep -c "NodeDescription.*softib[0-9]"; }
cat "$debug/tap" >trap.pcapng &
tap=$!
until [ -s trap.pcapng ]; do sleep 0.05; done
echo "softib4 out" >"$debug/links"
kept unplugged ibstat softib4
until [ "$(known)" = 3 ]; do pause; done # the switch's trap has told OpenSM, or its sweep
kill "$tap"
# A MAD by LID, version 1, method Trap: OpenSM would find the change without one, but later.
LC_ALL=C kept trap grep -acP "\x01\x01\x01\x05\x00{11}" trap.pcapng
echo "softib4 in" >"$debug/links"
until [ "$(state softib4)" = 4 ] && [ "$(known)" = 4 ]; do pause; done
kept plugged ibstat softib4
echo "switch0/2 out" >"$debug/links"
until [ "$(known)" = 2 ]; do pause; done
kept cut cat "$debug/links"
echo "switch0/2 in" >"$debug/links"
until [ "$(known)" = 4 ] && [ "$(state softib2)$(state softib4)" = 44 ]; do pause; done
echo "softib4 down" >"$debug/links"
kept down ibstat softib4
echo "softib4 up" >"$debug/links"
until [ "$(state softib4)" = 4 ]; do sleep 0.05; done
kept up ibstat softib4
while IFS=: read -r file line; do
    echo "$line" >"$debug/$file" || echo "refused: $file: $line"
done >refused.txt 2>/dev/null <<END
links:softib5 out
links:softib0 out
links:switch3/1 out
links:switch0/9 in
links:softib1 away
links:softib1 out now
links:softib1x out
links:nothing
links:
drop:softib1 many
drop:softib1 -1
gsi:switch1/1 fail
gsi:softib1 away
tables:switch3 0
tables:switch1/1 0
tables:switch1 never
tables:switch1 99999999
mlids:31
mlids:33
mlids:2048
mlids:32 32
hcas:softib5 remove
hcas:softib0 add
hcas:softib1 add
hcas:softib1 unicast
hcas:softib1 away
hcas:softib1 remove now
END
echo "softib3 2" >"$debug/drop"
kept dropping sh -c 'for i in 1 2 3 4 5 6 7 8; do smpquery -t 100 nodeinfo -G 0x5254000000010021; done'
echo "softib3 0" >"$debug/drop"
kept dropped perfquery -G 0x5254000000010021 1

locked=0x5254000000010031 # softib4
kept key.set ibportstate -G "$locked" 1 mkey 5 mkeyprot 2
kept key.unknown smpquery -t 100 portinfo -G "$locked"
kept key.known smpquery -y 5 portinfo -G "$locked"
kept key.cleared ibportstate -y 5 -G "$locked" 1 mkey 0 mkeyprot 0
kept key.none smpquery portinfo -G "$locked"

kept churn "$3" "$here/qp_churn.py" 10.77.0.1 10.77.0.2 10.77.0.3 "$4"
joins=/tmp/joins.pcapng # in memory: a reader that is slower than a storm loses packets
cat "$debug/tap" >"$joins" &
tap=$!
until [ -s "$joins" ]; do sleep 0.05; done
kept joins "$3" "$here/join_storm.py" "$5" "$6" 10.77.0.2 10.77.0.3 10.77.0.4
until LC_ALL=C grep -aqP "\xff\x12\x40\x01\xff\xff\x00{6}\x0f\x62\xff\xff" "$joins"; do sleep 0.05; done
kill "$tap"
cp "$joins" .
kept storm "$3" "$here/smp_storm.py" softib2 "$2" 1
pidof opensm >opensm.txt
# The storm has set what an SM may set, such as a switch's highest LID, which OpenSM does not look at again for long:
# a new OpenSM sets everything, but enables no port.
while read -r one _ other _; do
    for port in "$one" "$other"; do echo "$port up" >"$debug/links"; done
done <<LINKS
$(cat "$debug/links")
LINKS
kill "$(pidof opensm)"
while pidof opensm >/dev/null; do sleep 0.05; done
opensm -B -g 0x5254000000010001 >/dev/null 2>&1
until [ "$(saquery -C softib1 --smkey 1 -m | grep -c "$broadcast")" = 4 ]; do pause; done
passes mended "2 3" 2 1
# Not with a queue pair open; then with OpenSM, IPoIB and all that they have on it.
"$3" "$here/qp_churn.py" 10.77.0.4 held_open.txt &
holder=$!
until [ -s held_open.txt ] || ! kill -0 "$holder"; do sleep 0.05; done
kept in_use rmmod softib
echo "softib4 remove" >"$debug/hcas" & # it goes when the queue pair does
removal=$!
kill -KILL "$holder"
wait "$holder"
wait "$removal"
kept removed cat "$debug/hcas"
kept unload rmmod softib
kill -KILL "$(pidof opensm)" # without its device it does not end by itself
while pidof opensm >/dev/null; do sleep 0.05; done
kept log dmesg
