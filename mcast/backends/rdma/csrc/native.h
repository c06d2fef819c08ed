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

#endif
