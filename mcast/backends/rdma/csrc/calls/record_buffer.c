/* The records of received messages, and giving their receives back: what receiving and a lease of messages share. The
 * queue pair keeps the room of one batch that is gone, so a loop of batches allocates none. */
#include "calls.h"

void calls_give_back(struct calls *self, const struct mcast_message *messages, uint32_t count)
{
	if (self->forks == mcast_forks)
		mcast_release(&self->qp->receiving, messages[0].generation, messages, count);
}

void calls_return_buffer(struct calls *self, struct record_buffer buffer)
{
	BEGIN_ALONE((PyObject *)self);
	if (buffer.size > self->spare.size) {
		struct record_buffer smaller = self->spare;

		self->spare = buffer;
		buffer = smaller;
	}
	END_ALONE();
	PyMem_Free(buffer.records);
}
