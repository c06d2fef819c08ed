/* The state of a QP, and why it failed; state.h says who waits for it and what its lock guards. */
#include "state.h"

#include <sys/eventfd.h>

int mcast_open_state(struct qp_state *self)
{
	int ret = mcast_gate_open(&self->gate);

	if (!ret)
		pthread_mutex_init(&self->lock, NULL);
	return ret;
}

void mcast_free_state(struct qp_state *self)
{
	mcast_gate_free(&self->gate);
	pthread_mutex_destroy(&self->lock);
}

/* In ERR nobody sleeps: the gate's descriptor stays readable until the QP is reset. */
void mcast_set_state(struct qp_state *self, enum ibv_qp_state state)
{
	eventfd_t unused;

	if (state == IBV_QPS_ERR && self->state != IBV_QPS_ERR)
		(void)!eventfd_write(self->gate.wake_fd, 1);
	if (state != IBV_QPS_ERR && self->state == IBV_QPS_ERR) {
		(void)!eventfd_read(self->gate.wake_fd, &unused);
		if (mcast_is_shut(&self->gate))
			(void)!eventfd_write(self->gate.wake_fd, 1); /* the close had made it readable, which was read just now */
	}
	self->state = state;
}

void mcast_note_failure(struct qp_state *self, enum ibv_wc_status status)
{
	mcast_set_state(self, IBV_QPS_ERR);
	if (self->failure == IBV_WC_SUCCESS || self->failure == IBV_WC_WR_FLUSH_ERR)
		self->failure = status;
}

void mcast_note_reason(struct qp_state *self, int reason)
{
	self->reason = self->reason ? self->reason : reason;
	mcast_note_failure(self, IBV_WC_FATAL_ERR);
}

int mcast_note_gone(struct qp_state *self)
{
	mcast_note_reason(self, GONE);
	return -EIO;
}

int mcast_note_impossible(struct qp_state *self)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };

	if (self->state != IBV_QPS_ERR && self->qp)
		mcast_sym.ibv_modify_qp(self->qp, &attr, IBV_QP_STATE); /* the device shall write nothing more for it */
	mcast_note_reason(self, IMPOSSIBLE);
	return -EIO;
}

void mcast_forget_failure(struct qp_state *self)
{
	mcast_set_state(self, IBV_QPS_RESET);
	self->reason = 0;
	self->failure = IBV_WC_SUCCESS;
}
