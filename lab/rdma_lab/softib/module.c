// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* The module's parameters, and what happens when it is loaded and unloaded. */
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
	softib.mcast_entries = mcast_entries;
	softib.mlids = mcast_entries;
	softib.work = alloc_workqueue("softib", WQ_MEM_RECLAIM | WQ_UNBOUND, 0);
	error = softib.work ? softib_subnet_create() : -ENOMEM;
	if (error)
		softib_subnet_destroy();
	else
		softib_debug_create();
	return error;
}

static void __exit softib_exit(void)
{
	softib_debug_destroy();
	softib_subnet_destroy();
}

module_init(softib_init);
module_exit(softib_exit);
