"""One simulated host's door to the fabric: a program that sends SA MADs through libibumad.

libumad2sim makes one process one host, so each host is a process of its own; this one is run with
SIM_HOST and LD_PRELOAD set. Its arguments are a SOCK_SEQPACKET descriptor and the LID of the SM. Over
the descriptor it says "ready" once. Then come requests: a MAD of 256 bytes and a byte, for how many seconds
an answer is waited for; 0: none is wanted. For the others alone it returns the status (int32, 0 or an
errno), the number of answers to other requests met on the way (uint32), the length of the answer (uint32)
and its first 256 bytes.
"""

import ctypes
import errno
import socket
import struct
import sys

SA_CLASS, SA_VERSION, SA_QP, QP1_QKEY = 3, 2, 1, 0x80010000
MAD_SIZE, TID_AT = 256, 12
ANSWER_MS = 3000
MAX_ANSWER = 4096


def check(result: int, call: str) -> int:
    if result < 0:
        raise OSError(-result, f"{call} failed")
    return result


def serve(channel: socket.socket, sm_lid: int) -> None:
    umad = ctypes.CDLL("libibumad.so.3")
    umad.umad_size.restype = ctypes.c_size_t
    check(umad.umad_init(), "umad_init")
    port = check(umad.umad_open_port(None, 0), "umad_open_port")
    agent = check(umad.umad_register(port, SA_CLASS, SA_VERSION, 0, None), "umad_register")
    header = umad.umad_size()
    out = ctypes.create_string_buffer(header + MAD_SIZE)
    back = ctypes.create_string_buffer(header + MAX_ANSWER)
    mad_out = memoryview(out).cast("B")[header:]
    mad_back = memoryview(back).cast("B")[header:]
    length = ctypes.c_int()
    packet = bytearray(MAD_SIZE + 1)
    channel.send(b"ready")
    while channel.recv_into(packet):
        mad_out[:] = packet[:MAD_SIZE]
        umad.umad_set_addr(out, sm_lid, SA_QP, 0, QP1_QKEY)
        wait = packet[MAD_SIZE] * 1000
        status = umad.umad_send(port, agent, out, MAD_SIZE, wait or ANSWER_MS, 0)
        if not wait:
            continue
        strays = 0
        while status >= 0:
            length.value = MAX_ANSWER
            status = umad.umad_recv(port, back, ctypes.byref(length), wait)
            if status < 0 or mad_back[TID_AT : TID_AT + 4] == packet[TID_AT : TID_AT + 4]:
                break
            strays += 1
        error = -status if status < 0 else umad.umad_status(back)
        channel.send(struct.pack("=iII", error, strays, length.value) + mad_back[:MAD_SIZE])


if __name__ == "__main__":
    try:
        serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2], 0))
    except OSError as failed:
        if failed.errno not in (errno.EPIPE, errno.ECONNRESET):
            raise
