# Sends messages between two RDMA devices: messages.sh DEVICE DEVICE SECONDS COUNT; the status is 0 if all arrive.

gid() { # DEVICE: the option for its IPv4-mapped GID, which RoCE wants
    for file in "/sys/class/infiniband/$1/ports/1/gids/"*; do
        case $(cat "$file" 2>/dev/null) in *:ffff:*) echo "-g ${file##*/}" && return ;; esac
    done
}

timeout "$3" ibv_ud_pingpong -d "$2" $(gid "$2") -n "$4" >/dev/null 2>&1 &
server=$!
until grep -q ":4853 0*:0000 0A" /proc/net/tcp /proc/net/tcp6; do sleep 0.1; done # the server listens
timeout "$3" ibv_ud_pingpong -d "$1" $(gid "$1") -n "$4" 10.77.0.1 || { kill "$server"; exit 1; }
