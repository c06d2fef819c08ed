// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* Builds the subnet when the module is loaded, and takes it down. */
#include <linux/module.h>

#include "softib.h"

MODULE_LICENSE("Dual BSD/GPL");
MODULE_DESCRIPTION("InfiniBand HCAs and switches in memory");

static unsigned int hcas = 2, switches = 1, mcast_entries = 1024;

module_param(hcas, uint, 0444);
MODULE_PARM_DESC(hcas, "HCAs of one port, 1 to 64");
module_param(switches, uint, 0444);
MODULE_PARM_DESC(switches, "1, or a root and leaves that the HCAs are dealt to in turn; at most 16");
module_param(mcast_entries, uint, 0444);
MODULE_PARM_DESC(mcast_entries, "MLIDs in each switch's multicast forwarding table, 32 to 16352, a multiple of 32");

struct softib softib = { .lock = __SPIN_LOCK_UNLOCKED(softib.lock) };

/* The switch that an HCA hangs on: with more than one, switch 0 is the root and has switches alone. */
static unsigned int switch_of(unsigned int hca)
{
	return softib.switches > 1 ? 1 + hca % (softib.switches - 1) : 0;
}

static void take_down(void)
{
	unsigned int i;

	/* The first, where a subnet manager is most likely, goes last: it answers the others, who leave their groups. */
	for (i = softib.hcas; i--; )
		if (softib.hca[i])
			softib_hca_destroy(softib.hca[i]);
	/* A trap of one switch goes through the others: all are silent before the first is freed. */
	for (i = 0; i < softib.switches; i++)
		if (softib.sw[i])
			softib_switch_silence(softib.sw[i]);
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
static int build(void)
{
	unsigned int i;
	int error;
	u8 down = DIV_ROUND_UP(softib.hcas, leaves());

	for (i = 0; i < softib.switches; i++) {
		u8 ports = softib.switches == 1 ? down : i ? down + 1 : leaves();

		softib.sw[i] = softib_switch_create(i, ports);
		if (!softib.sw[i])
			return -ENOMEM;
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

static int __init softib_init(void)
{
	int error;

	if (hcas < 1 || hcas > SOFTIB_HCAS || switches < 1 || switches > SOFTIB_SWITCHES ||
	    mcast_entries < SOFTIB_MFT_BLOCK || mcast_entries > 511 * SOFTIB_MFT_BLOCK ||
	    mcast_entries % SOFTIB_MFT_BLOCK) {
		pr_err("softib: hcas=%u switches=%u mcast_entries=%u: out of range, see modinfo\n",
		       hcas, switches, mcast_entries);
		return -EINVAL;
	}
	softib.hcas = hcas;
	softib.switches = switches;
	softib.mcast_entries = softib.mlids = mcast_entries;
	softib.work = alloc_workqueue("softib", WQ_MEM_RECLAIM, 0);
	error = softib.work ? build() : -ENOMEM;
	if (error)
		take_down();
	else
		softib_debug_create();
	return error;
}

static void __exit softib_exit(void)
{
	softib_debug_destroy();
	take_down();
}

module_init(softib_init);
module_exit(softib_exit);
