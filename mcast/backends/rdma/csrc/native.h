/* The libraries' own types, and what the C files share with Python. */
#ifndef MCAST_NATIVE_H
#define MCAST_NATIVE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include "cdefs.h"

/* -errno of what a call of libibverbs returned. Most return the errno (AT-2); some drivers return -1 and set it. */
static inline int mcast_returned(int ret)
{
	return ret < 0 ? -(errno ? errno : EIO) : -ret;
}

/* -errno after a call that failed and should have set it; `fallback` if it has not. */
static inline int mcast_errno_or(int fallback)
{
	return -(errno ? errno : fallback);
}

#endif
