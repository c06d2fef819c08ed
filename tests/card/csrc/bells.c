/* Descriptors that are readable while something waits, and what waits. */
#include "inside.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

int open_bell(struct bell *bell, int breakable)
{
	int ends[2];

	if (!breakable) {
		bell->fd = bell->peer = eventfd(0, EFD_CLOEXEC);
		return bell->fd < 0 ? errno : 0;
	}
	if (socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends))
		return errno;
	bell->fd = ends[0];
	bell->peer = ends[1];
	return 0;
}

void close_bell(struct bell *bell)
{
	close(bell->fd);
	if (bell->peer != bell->fd)
		close(bell->peer);
}

void ring(struct bell *bell, int wanted)
{
	uint64_t one = 1;

	if (wanted && !bell->rung)
		(void)!write(bell->peer, &one, sizeof(one));
	if (!wanted && bell->rung)
		(void)!read(bell->fd, &one, sizeof(one));
	bell->rung = wanted;
}

/* From now on poll(2) gives POLLERR for it, as for a channel whose device is gone: a datagram that the other end
 * has not read is lost when that end disconnects, and this end is told by an error. */
void break_bell(struct bell *bell)
{
	struct sockaddr nobody = { .sa_family = AF_UNSPEC };

	if (bell->peer == bell->fd)
		return;
	ring(bell, 0);
	(void)!write(bell->fd, "", 1);
	(void)!connect(bell->peer, &nobody, sizeof(nobody));
	bell->rung = -1;
}

int await_bell(struct bell *bell)
{
	struct pollfd fd = { .fd = bell->fd, .events = POLLIN };

	/* as ib_uverbs_event_read: a reader that does not wait is not told that the device is gone */
	int waits = !(fcntl(bell->fd, F_GETFL) & O_NONBLOCK);

	while (bell->rung <= 0) {
		if (!waits || bell->rung < 0) {
			errno = waits ? EIO : EAGAIN;
			return -1;
		}
		pthread_mutex_unlock(&card_lock);
		if (poll(&fd, 1, -1) < 0) {
			pthread_mutex_lock(&card_lock);
			return -1;
		}
		pthread_mutex_lock(&card_lock);
	}
	return 0;
}

int open_queue(struct queue *queue, int breakable)
{
	queue->last = &queue->first;
	return open_bell(&queue->bell, breakable);
}

void forget(struct queue *queue, const void *about)
{
	struct node **at = &queue->first;

	while (*at) {
		struct node *node = *at;

		if (about && node->about != about) {
			at = &node->next;
			continue;
		}
		*at = node->next;
		free(node);
	}
	queue->last = at;
	if (queue->bell.rung > 0)
		ring(&queue->bell, queue->first != NULL);
}

void close_queue(struct queue *queue)
{
	forget(queue, NULL);
	close_bell(&queue->bell);
}

void put(struct queue *queue, struct node node)
{
	struct node *kept = malloc(sizeof(*kept));

	if (!kept)
		abort();
	if (queue->bell.rung < 0) {
		free(kept);
		return;
	}
	node.next = NULL;
	*kept = node;
	*queue->last = kept;
	queue->last = &kept->next;
	ring(&queue->bell, 1);
}

int take(struct queue *queue, struct node *out)
{
	struct node *node;

	if (await_bell(&queue->bell))
		return -1;
	node = queue->first;
	*out = *node;
	queue->first = node->next;
	if (!queue->first)
		queue->last = &queue->first;
	free(node);
	ring(&queue->bell, queue->first != NULL);
	return 0;
}
