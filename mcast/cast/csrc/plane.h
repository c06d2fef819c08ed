/* Data plane of cast: what is done for each message, in C. Python decides, once for each batch.
 *
 * `mcast/cast/protocol` does the same in Python, slower, where this module was not built; it is the oracle of the tests. */
#ifndef MCAST_CAST_PLANE_H
#define MCAST_CAST_PLANE_H

#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>
#if !defined(Py_LIMITED_API) && !defined(Py_GIL_DISABLED)
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#include <stdint.h>

/* Header of a DATA packet, as `packets.encode` writes it; integers are in network order. */
enum {
	HEADER_BYTES = 26,
	SESSION_AT = 8,
	OBJECT_AT = 16,
	BLOCK_AT = 20,
	ESI_AT = 24,
};

/* Bounds of the fields, as in packets.py. */
enum {
	MAX_K = 128,
	MAX_PARITY = 32,
	MAX_SEGMENT = 1 << 14,
	MAX_RUN = 1 << 20, /* segments of one call: its products fit into 64 bits */
};
#define MAX_BLOCKS (INT64_C(1) << 31)

static inline void put16(uint8_t *to, uint16_t value)
{
	to[0] = (uint8_t)(value >> 8);
	to[1] = (uint8_t)value;
}

static inline void put32(uint8_t *to, uint32_t value)
{
	put16(to, (uint16_t)(value >> 16));
	put16(to + 2, (uint16_t)value);
}

#endif
