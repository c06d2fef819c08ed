/* Deadlines, and sleeping on file descriptors. */
#ifndef MCAST_WAIT_H
#define MCAST_WAIT_H

#include "native.h"

#include <poll.h>

/* CLOCK_MONOTONIC in nanoseconds. */
int64_t mcast_now(void);

static const int64_t FOREVER = INT64_MAX;

enum { NO_FD = -1 }; /* poll(2) ignores this number */

/* Conditions that end a sleep besides its object: descriptors or NO_FD, and CLOCK_MONOTONIC in nanoseconds or FOREVER. */
struct mcast_wait {
	int event_fd;  /* -EAGAIN: an event waits, there or of the port */
	int signal_fd; /* -EINTR: a signal came, to whichever thread */
	int64_t deadline;
	int64_t spin_until; /* look at the queue, and do not sleep before */
	int is_last; /* of a QP that is being closed; that ends all other waits */
};

/* Sleep until one of `fds` has something to tell: how many have; 0: too late. Or -errno. */
int mcast_sleep(struct pollfd *fds, unsigned count, int64_t deadline);

#endif
