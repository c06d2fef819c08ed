// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* A switch's forwarding tables: as the subnet manager writes them, and as messages are forwarded by them. */
#include <linux/vmalloc.h>

#include "softib.h"

static size_t multicast_bytes(u8 ports)
{
	return array3_size(ports / SOFTIB_MFT_PORTS + 1, softib.mcast_entries, sizeof(u16));
}

static bool make_tables(struct softib_tables *tables, u8 ports)
{
	tables->linear = vmalloc(SOFTIB_LINEAR_ENTRIES);
	tables->multicast = vzalloc(multicast_bytes(ports));
	if (tables->linear)
		memset(tables->linear, SOFTIB_NO_PORT, SOFTIB_LINEAR_ENTRIES);
	return tables->linear && tables->multicast;
}

/* From now on messages go by what is written. The caller has softib.lock. */
static void take_effect(struct softib_switch *sw)
{
	memcpy(sw->used.linear, sw->written.linear, SOFTIB_LINEAR_ENTRIES);
	memcpy(sw->used.multicast, sw->written.multicast, multicast_bytes(sw->node.ports));
}

static void late_work(struct work_struct *work)
{
	struct softib_switch *sw = container_of(to_delayed_work(work), struct softib_switch, late);
	unsigned long flags;

	spin_lock_irqsave(&softib.lock, flags);
	if (sw->delay_ms != SOFTIB_HELD)
		take_effect(sw);
	spin_unlock_irqrestore(&softib.lock, flags);
}

/* The subnet manager has written into a table. The caller has softib.lock. */
void softib_tables_written(struct softib_switch *sw)
{
	if (!sw->delay_ms)
		take_effect(sw);
	else if (sw->delay_ms != SOFTIB_HELD)
		mod_delayed_work(softib.work, &sw->late, msecs_to_jiffies(sw->delay_ms));
}

/* From now on what is written takes effect later; what waits for that, with 0 at once. The caller has softib.lock. */
void softib_tables_delay(struct softib_switch *sw, u32 delay_ms)
{
	sw->delay_ms = delay_ms;
	softib_tables_written(sw);
}

/* False: there is no memory; what was made goes with softib_tables_destroy(). */
bool softib_tables_create(struct softib_switch *sw, u8 ports)
{
	INIT_DELAYED_WORK(&sw->late, late_work);
	return make_tables(&sw->written, ports) && make_tables(&sw->used, ports);
}

void softib_tables_destroy(struct softib_switch *sw)
{
	vfree(sw->used.multicast);
	vfree(sw->used.linear);
	vfree(sw->written.multicast);
	vfree(sw->written.linear);
}
