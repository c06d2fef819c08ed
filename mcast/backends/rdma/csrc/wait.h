/* Deadlines, and sleeping on a file descriptor together with a wake-up eventfd. */
#ifndef MCAST_WAIT_H
#define MCAST_WAIT_H

#include "native.h"

/* CLOCK_MONOTONIC in nanoseconds. */
int64_t mcast_now(void);

enum { NO_FD = -1 }; /* what poll(2) passes over */

/* 1: fd is readable. -EAGAIN: event_fd is. 0: the deadline has passed, or wake_fd was rung. -EINTR: a signal;
 * or another -errno. */
int mcast_wait_readable(int fd, int wake_fd, int event_fd, int64_t deadline);

#endif
