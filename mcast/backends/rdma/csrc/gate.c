/* The gate of an object: gate.h says who waits for whom. */
#include "gate.h"

#include <sys/eventfd.h>
#include <unistd.h>

int mcast_gate_open(struct mcast_gate *gate)
{
	gate->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (gate->wake_fd < 0)
		return -errno;
	pthread_mutex_init(&gate->lock, NULL);
	pthread_cond_init(&gate->left, NULL);
	return 0;
}

void mcast_gate_left(struct mcast_gate *gate)
{
	pthread_mutex_lock(&gate->lock);
	pthread_cond_broadcast(&gate->left);
	pthread_mutex_unlock(&gate->lock);
}

void mcast_gate_shut(struct mcast_gate *gate)
{
	__atomic_store_n(&gate->shut, 1, __ATOMIC_SEQ_CST);
	(void)!eventfd_write(gate->wake_fd, 1);
	pthread_mutex_lock(&gate->lock);
	while (__atomic_load_n(&gate->users, __ATOMIC_SEQ_CST))
		pthread_cond_wait(&gate->left, &gate->lock);
	pthread_mutex_unlock(&gate->lock);
}

void mcast_gate_end(struct mcast_gate *gate)
{
	if (gate->wake_fd >= 0)
		close(gate->wake_fd);
	gate->wake_fd = -1;
}

void mcast_gate_free(struct mcast_gate *gate)
{
	mcast_gate_end(gate);
	pthread_mutex_destroy(&gate->lock);
	pthread_cond_destroy(&gate->left);
}
