/* Address handles: handles.h says how long one lives. */
#include "handles.h"

#include <stdlib.h>

int mcast_make_ah(struct ibv_pd *pd, const struct mcast_ah_init *init, struct mcast_ah **out)
{
	struct ibv_ah_attr attr = {
		.grh = { .flow_label = init->flow_label,
			 .sgid_index = init->sgid_index,
			 .hop_limit = init->hop_limit,
			 .traffic_class = init->traffic_class },
		.dlid = init->dlid,
		.sl = init->sl,
		.static_rate = init->static_rate,
		.src_path_bits = init->src_path_bits,
		.is_global = init->is_global,
		.port_num = init->port_num,
	};
	struct mcast_ah *new = calloc(1, sizeof(*new));
	int ret;

	if (!new)
		return -ENOMEM;
	memcpy(attr.grh.dgid.raw, init->gid, sizeof(attr.grh.dgid.raw));
	errno = 0;
	new->ah = mcast_sym.ibv_create_ah(pd, &attr);
	if (new->ah) {
		*out = new;
		return 0;
	}
	ret = mcast_errno_or(EINVAL);
	free(new);
	return ret;
}

uint64_t mcast_add_ah(struct address_handles *self, struct mcast_ah *new)
{
	new->serial = ++self->last_serial;
	new->next = self->first;
	self->first = new;
	return new->serial;
}

struct mcast_ah *mcast_find_ah(struct address_handles *self, uint64_t serial)
{
	for (struct mcast_ah **at = &self->first; *at; at = &(*at)->next) {
		struct mcast_ah *found = *at;

		if (found->serial != serial)
			continue;
		if (found != self->first) { /* to the front: the next send likely goes there, too */
			*at = found->next;
			found->next = self->first;
			self->first = found;
		}
		return found->is_retired ? NULL : found;
	}
	return NULL;
}

void mcast_retire_all_ahs(struct address_handles *self)
{
	for (struct mcast_ah *ah = self->first; ah; ah = ah->next)
		ah->is_retired = 1;
}

int mcast_sweep_ahs(struct address_handles *self, uint64_t tail)
{
	struct mcast_ah **at = &self->first;
	int ret = 0;

	while (*at) {
		struct mcast_ah *one = *at;
		int is_over = one->is_retired && one->end <= tail;
		int failed = is_over ? mcast_returned(mcast_sym.ibv_destroy_ah(one->ah)) : 0;

		ret = ret ? ret : failed;
		if (is_over && !failed) {
			*at = one->next;
			free(one);
		} else {
			at = &one->next;
		}
	}
	return ret;
}
