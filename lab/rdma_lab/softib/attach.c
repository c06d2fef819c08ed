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

/*
 * Whether one more fits: so many queue pairs in a group, so many groups, as the HCA says of itself. New ones are
 * put behind the last of their group, so that a group is counted where it begins.
 */
static bool has_room(struct softib_hca *hca, union ib_gid *gid, struct list_head **after)
{
	struct rvt_driver_params *limits = &hca->rdi.dparms;
	unsigned int groups = 0, pairs = 0;
	struct softib_attachment *one, *last = NULL;

	*after = hca->attached.prev;
	list_for_each_entry(one, &hca->attached, list) {
		groups += !last || memcmp(&last->mgid, &one->mgid, sizeof(*gid));
		last = one;
		if (!memcmp(&one->mgid, gid, sizeof(*gid))) {
			*after = &one->list;
			pairs++;
		}
	}
	return pairs ? pairs < limits->props.max_mcast_qp_attach : groups < limits->props.max_mcast_grp;
}

/* The core has checked that it is UD, and the GID and LID are multicast; a second time changes nothing. */
int softib_attach(struct ib_qp *ibqp, union ib_gid *gid, u16 lid)
{
	struct softib_hca *hca = container_of(ib_to_rvt(ibqp->device), struct softib_hca, rdi);
	struct softib_attachment *new = kzalloc(sizeof(*new), GFP_KERNEL);
	struct list_head *after;
	int error = 0;

	if (!new)
		return -ENOMEM;
	new->qp = ibqp_to_rvtqp(ibqp);
	new->mgid = *gid;
	new->mlid = lid;
	spin_lock(&hca->attach_lock);
	if (find(hca, ibqp, gid, lid)) {
		kfree(new);
	} else if (!has_room(hca, gid, &after)) {
		kfree(new);
		error = -ENOMEM;
	} else {
		list_add_rcu(&new->list, after);
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
	if (old)
		list_del_rcu(&old->list);
	spin_unlock(&hca->attach_lock);
	if (!old)
		return -EINVAL;
	kfree_rcu(old, rcu);	/* a message may be on its way to it: qp_priv_free waits for that before the QP goes */
	return 0;
}
