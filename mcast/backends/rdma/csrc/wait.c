/* Deadlines, and sleeping on descriptors: no lock, and no state. */
#include "wait.h"

#include <time.h>

int64_t mcast_now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

int mcast_sleep(struct pollfd *fds, unsigned count, int64_t deadline)
{
	struct timespec budget = { 0 };
	int ready;

	if (deadline != FOREVER) {
		int64_t left = deadline - mcast_now();

		if (left > 0)
			budget = (struct timespec){ (time_t)(left / 1000000000), (long)(left % 1000000000) };
	}
	ready = ppoll(fds, count, deadline == FOREVER ? NULL : &budget, NULL);
	return ready < 0 ? -errno : ready;
}
