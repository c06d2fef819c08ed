# Runs the field's own tools, none of them ours, on the lab's InfiniBand fabric of four ports and three switches.
# What each says is kept in the directory $1 as NAME.out, its exit status as NAME.status.
cd "$1" || exit 1
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
    until [ "$(saquery --smkey 1 -m | grep -c "$mgid")" = "$3" ]; do sleep 0.05; done
    kept "$1.route" ibroute -M -G "$leaf_2"
    # They attach a moment after they became members: there are messages until all have enough.
    until [ "$(finished "$1" "$2")" = "$3" ]; do
        kept "$1.sender" mckey -s $5 -m 239.1.1.7 -b "10.77.0.$4" -C 100 -S 512
    done
    wait
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
kept log dmesg
