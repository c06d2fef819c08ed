// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Queue pairs attached to groups. rdmavt has a table of its own; that one refuses to detach a queue pair in RESET,
 * whose end then waits for ever, and knows no second MLID of an MGID.
 */
#include <linux/slab.h>

#include "softib.h"

static struct softib_attachment *find(struct softib_hca *hca, struct ib_qp *ibqp, union ib_gid *gid, u16 lid)
{
	struct softib_attachment *one;

	list_for_each_entry(one, &hca->attached, list)
		if (one->qp == ibqp_to_rvtqp(ibqp) && one->mlid == lid && !memcmp(&one->mgid, gid, sizeof(*gid)))
			return one;
	return NULL;
}

/* The core has checked that it is UD, and the GID and LID are multicast; a second time changes nothing. */
int softib_attach(struct ib_qp *ibqp, union ib_gid *gid, u16 lid)
{
	struct softib_hca *hca = container_of(ib_to_rvt(ibqp->device), struct softib_hca, rdi);
	struct softib_attachment *new = kzalloc(sizeof(*new), GFP_KERNEL);
	int error = 0;

	if (!new)
		return -ENOMEM;
	new->qp = ibqp_to_rvtqp(ibqp);
	new->mgid = *gid;
	new->mlid = lid;
	spin_lock(&hca->attach_lock);
	if (find(hca, ibqp, gid, lid)) {
		kfree(new);
	} else if (hca->attachments >= hca->rdi.dparms.props.max_total_mcast_qp_attach) {
		kfree(new);
		error = -ENOMEM;
	} else {
		list_add_tail_rcu(&new->list, &hca->attached);
		hca->attachments++;
	}
	spin_unlock(&hca->attach_lock);
	return error;
}

int softib_detach(struct ib_qp *ibqp, union ib_gid *gid, u16 lid)
{
	struct softib_hca *hca = container_of(ib_to_rvt(ibqp->device), struct softib_hca, rdi);
	struct softib_attachment *old;

	spin_lock(&hca->attach_lock);
	old = find(hca, ibqp, gid, lid);
	if (old) {
		list_del_rcu(&old->list);
		hca->attachments--;
	}
	spin_unlock(&hca->attach_lock);
	if (!old)
		return -EINVAL;
	kfree_rcu(old, rcu);	/* a message may be on its way to it: qp_priv_free waits for that before the QP goes */
	return 0;
}
