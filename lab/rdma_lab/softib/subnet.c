// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* The subnet as a whole: which switches and HCAs there are, and the cables between them. */
#include "softib.h"

struct softib softib = { .lock = __SPIN_LOCK_UNLOCKED(softib.lock) };

/* The switch that an HCA hangs on: with more than one, switch 0 is the root and has switches alone. */
static unsigned int switch_of(unsigned int hca)
{
	return softib.switches > 1 ? 1 + hca % (softib.switches - 1) : 0;
}

void softib_subnet_destroy(void)
{
	unsigned int i;

	/* The first, where a subnet manager is most likely, goes last: it answers the others, which leave groups. */
	for (i = softib.hcas; i--; )
		if (softib.hca[i])
			softib_hca_destroy(softib.hca[i]);
	/* A trap of one switch goes through the others: all are silent before the first is freed. */
	for (i = 0; i < softib.switches; i++)
		if (softib.sw[i])
			softib_switch_cancel_work(softib.sw[i]);
	for (i = 0; i < softib.switches; i++)
		if (softib.sw[i])
			softib_switch_destroy(softib.sw[i]);
	if (softib.work)
		destroy_workqueue(softib.work);
}

static unsigned int leaves(void)
{
	return max(softib.switches - 1, 1u);
}

/* Makes an HCA, which may lack multicast. Its cable ends in port 1 + index / leaves of its switch. */
int softib_add(unsigned int index, bool multicast)
{
	struct softib_hca *hca = softib_hca_create(index, multicast);

	if (IS_ERR(hca))
		return PTR_ERR(hca);
	softib_connect(&hca->port[1], &softib.sw[switch_of(index)]->port[1 + index / leaves()]);
	return 0;
}

/* A leaf's last port leads to the root. */
int softib_subnet_create(void)
{
	unsigned int i;
	int error;
	u8 down = DIV_ROUND_UP(softib.hcas, leaves());

	for (i = 0; i < softib.switches; i++) {
		u8 ports = softib.switches == 1 ? down : i ? down + 1 : leaves();

		softib.sw[i] = softib_switch_create(i, ports);
		if (!softib.sw[i])
			return -ENOMEM;
		softib_trap_init(&softib.sw[i]->node);
		if (i)
			softib_connect(&softib.sw[i]->port[down + 1], &softib.sw[0]->port[i]);
	}
	for (i = 0; i < softib.hcas; i++) {
		error = softib_add(i, true);
		if (error)
			return error;
	}
	return 0;
}
