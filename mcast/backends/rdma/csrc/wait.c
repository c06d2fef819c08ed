#include "wait.h"

#include <poll.h>
#include <time.h>

int64_t mcast_now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

int mcast_wait_readable(int fd, int wake_fd, int event_fd, int64_t deadline)
{
	struct pollfd fds[] = { { .fd = fd, .events = POLLIN },
				{ .fd = wake_fd, .events = POLLIN },
				{ .fd = event_fd, .events = POLLIN } };
	int64_t left = deadline - mcast_now();
	struct timespec budget = { 0 };

	if (left > 0) {
		budget.tv_sec = (time_t)(left / 1000000000);
		budget.tv_nsec = (long)(left % 1000000000);
	}
	if (ppoll(fds, sizeof(fds) / sizeof(*fds), &budget, NULL) < 0)
		return -errno;
	if (fds[0].revents)
		return 1;
	return fds[2].revents ? -EAGAIN : 0;
}
