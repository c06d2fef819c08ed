// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * What root may do to the fabric, and see of it, in /sys/kernel/debug/softib:
 *   links     each cable and the states of its ends; "softib2 out" and "switch1/3 in" take it out and put it in,
 *             "softib2 down" and "softib2 up" disable and enable one end
 *   hcas      "softib2 remove" unregisters that HCA, which takes until every process has closed it; "softib2 add" makes
 *             it anew, "softib2 unicast" without multicast. Shown: each HCA, "here" or "gone"
 *   drop      "softib2 10" loses every tenth message that arrives there, "softib2 3/10" three of ten; 0 ends that.
 *             Shown: port, its state, and how many of how many
 *   gsi       "softib2 fail": what that HCA sends from QP 1 ends in an error; "softib2 send" ends that. Shown: each HCA
 *   tables    "switch1 500": what the subnet manager writes into that switch's forwarding tables takes effect 500 ms
 *             after the last write; "switch1 hold": not before "switch1 0". Shown: each switch, and its delay
 *   mlids     of the multicast forwarding tables so many entries are there; the subnet manager asks when it starts
 *   attached  the queue pairs in groups: HCA, number, MGID, MLID
 *   tap       a capture file of what HCAs send and get while it is read
 */
#include <linux/debugfs.h>
#include <linux/module.h>
#include <linux/seq_file.h>
#include <linux/uaccess.h>

#include "softib.h"

#define LINE 64
#define WORD 16
#define MAX_DROP_OF 1000000
#define MAX_DELAY_MS (60 * 60 * 1000)

static struct dentry *folder;

/* The port that the first word of a line names; NULL if there is none. The caller has softib.lock. */
static struct softib_port *port_named(const char *word)
{
	unsigned int number, port;
	char more;

	if (sscanf(word, "softib%u%c", &number, &more) == 1) {
		if (!number || number > softib.hcas || !softib.hca[number - 1])
			return NULL;
		return &softib.hca[number - 1]->port[1];
	}
	if (sscanf(word, "switch%u/%u%c", &number, &port, &more) == 2)
		return number < softib.switches && port && port <= softib.sw[number]->node.ports ?
			&softib.sw[number]->port[port] : NULL;
	return NULL;
}

/* Each does what a line of two words says. 0, or -EINVAL if it says nothing. The caller has softib.lock. */

static int change_links(const char *who, const char *what)
{
	struct softib_port *port = port_named(who);

	if (!port)
		return -EINVAL;
	if (!strcmp(what, "in") || !strcmp(what, "out"))
		softib_plug(port, !strcmp(what, "in"));
	else if (!strcmp(what, "up") || !strcmp(what, "down"))
		softib_enable(port, !strcmp(what, "up"));
	else
		return -EINVAL;
	return 0;
}

static int change_drop(const char *who, const char *what)
{
	struct softib_port *port = port_named(who);
	u32 drop, of;
	char more;

	if (sscanf(what, "%u/%u%c", &drop, &of, &more) != 2) {
		if (kstrtou32(what, 10, &of))
			return -EINVAL;
		drop = of > 0;		/* one of so many; or none */
	} else if (!of) {
		return -EINVAL;
	}
	if (!port || drop > of || of > MAX_DROP_OF)
		return -EINVAL;
	port->drop = drop;
	port->drop_of = of;
	port->received = 0;
	return 0;
}

static int change_gsi(const char *who, const char *what)
{
	struct softib_port *port = port_named(who);
	bool fails = !strcmp(what, "fail");

	if (!port || softib_is_switch(port->node) || (!fails && strcmp(what, "send")))
		return -EINVAL;
	WRITE_ONCE(softib_hca_of(port->node)->gsi_fails, fails);
	return 0;
}

static int change_tables(const char *who, const char *what)
{
	u32 number, delay_ms = SOFTIB_HELD;
	char more;

	if (sscanf(who, "switch%u%c", &number, &more) != 1 || number >= softib.switches)
		return -EINVAL;
	if (strcmp(what, "hold") && (kstrtou32(what, 10, &delay_ms) || delay_ms > MAX_DELAY_MS))
		return -EINVAL;
	softib_tables_delay(softib.sw[number], delay_ms);
	return 0;
}

static int change_mlids(const char *number, const char *nothing)
{
	u32 mlids;

	if (*nothing || kstrtou32(number, 10, &mlids) || mlids < SOFTIB_MFT_BLOCK ||
	    mlids > softib.mcast_entries || mlids % SOFTIB_MFT_BLOCK)
		return -EINVAL;
	softib.mlids = mlids;
	return 0;
}

static int read_line(const char __user *from, size_t length, char word[3][WORD])
{
	char line[LINE];

	if (length >= sizeof(line))
		return -EINVAL;
	if (copy_from_user(line, from, length))
		return -EFAULT;
	line[length] = 0;
	return sscanf(line, "%15s %15s %15s", word[0], word[1], word[2]) > 2 ? -EINVAL : 0;
}

static ssize_t write_line(const char __user *from, size_t length, int (*change)(const char *, const char *))
{
	char word[3][WORD] = { };
	unsigned long flags;
	int error = read_line(from, length, word);

	if (error)
		return error;
	spin_lock_irqsave(&softib.lock, flags);
	error = change(word[0], word[1]);
	spin_unlock_irqrestore(&softib.lock, flags);
	return error ? error : length;
}

/* Adding and removing sleep. An HCA is busy with one of them at a time, and none waits for another HCA's. */
static ssize_t hcas_write(struct file *file, const char __user *from, size_t length, loff_t *at)
{
	static DECLARE_BITMAP(busy, SOFTIB_HCAS);
	char word[3][WORD] = { }, more;
	int error = read_line(from, length, word);
	bool unicast = !strcmp(word[1], "unicast"), add = unicast || !strcmp(word[1], "add");
	unsigned int number;

	if (error)
		return error;
	if (sscanf(word[0], "softib%u%c", &number, &more) != 1 || !number || number > softib.hcas ||
	    (!add && strcmp(word[1], "remove")))
		return -EINVAL;
	if (test_and_set_bit(number - 1, busy))
		return -EBUSY;
	if (add == !!softib.hca[number - 1])
		error = add ? -EEXIST : -ENODEV;
	else if (add)
		error = softib_add(number - 1, !unicast);
	else
		softib_hca_destroy(softib.hca[number - 1]);
	clear_bit(number - 1, busy);
	return error ? error : length;
}

static int hcas_show(struct seq_file *file, void *unused)
{
	unsigned int i;

	for (i = 0; i < softib.hcas; i++)
		seq_printf(file, "softib%u %s\n", i + 1, READ_ONCE(softib.hca[i]) ? "here" : "gone");
	return 0;
}

static void show_port(struct seq_file *file, const struct softib_port *port)
{
	if (softib_is_switch(port->node))
		seq_printf(file, "switch%u/%u %u", port->node->index, port->number, softib_state(port));
	else
		seq_printf(file, "softib%u %u", port->node->index + 1, softib_state(port));
}

static int links_show(struct seq_file *file, void *unused)
{
	unsigned long flags;
	unsigned int i, number;

	spin_lock_irqsave(&softib.lock, flags);
	for (i = 0; i < softib.switches; i++)
		for (number = 1; number <= softib.sw[i]->node.ports; number++) {
			const struct softib_port *port = &softib.sw[i]->port[number];

			if (!port->peer || (softib_is_switch(port->peer->node) && !i))
				continue;	/* a cable between switches is shown at the leaf */
			show_port(file, port);
			seq_putc(file, ' ');
			show_port(file, port->peer);
			seq_puts(file, port->unplugged ? " out\n" : " in\n");
		}
	spin_unlock_irqrestore(&softib.lock, flags);
	return 0;
}

static void show_drop(struct seq_file *file, const struct softib_port *port)
{
	if (!port->drop)
		return;
	show_port(file, port);
	seq_printf(file, " %u/%u\n", port->drop, port->drop_of);
}

static int drop_show(struct seq_file *file, void *unused)
{
	unsigned int i, number;
	unsigned long flags;

	spin_lock_irqsave(&softib.lock, flags);
	for (i = 0; i < softib.hcas; i++)
		if (softib.hca[i])
			show_drop(file, &softib.hca[i]->port[1]);
	for (i = 0; i < softib.switches; i++)
		for (number = 1; number <= softib.sw[i]->node.ports; number++)
			show_drop(file, &softib.sw[i]->port[number]);
	spin_unlock_irqrestore(&softib.lock, flags);
	return 0;
}

static int gsi_show(struct seq_file *file, void *unused)
{
	unsigned long flags;
	unsigned int i;

	spin_lock_irqsave(&softib.lock, flags);
	for (i = 0; i < softib.hcas; i++)
		if (softib.hca[i])
			seq_printf(file, "softib%u %s\n", i + 1, softib.hca[i]->gsi_fails ? "fail" : "send");
	spin_unlock_irqrestore(&softib.lock, flags);
	return 0;
}

static int attached_show(struct seq_file *file, void *unused)
{
	const struct softib_attachment *one;
	struct softib_hca *hca;
	unsigned int i;

	rcu_read_lock();
	for (i = 0; i < softib.hcas; i++) {
		hca = READ_ONCE(softib.hca[i]);
		if (!hca)
			continue;
		list_for_each_entry_rcu(one, &hca->attached, list)
			seq_printf(file, "softib%u %u %pI6 0x%04x\n", i + 1, one->qp->ibqp.qp_num, &one->mgid,
				   one->mlid);
	}
	rcu_read_unlock();
	return 0;
}

static int tables_show(struct seq_file *file, void *unused)
{
	unsigned int i;

	for (i = 0; i < softib.switches; i++) {
		u32 delay_ms = READ_ONCE(softib.sw[i]->delay_ms);

		if (delay_ms == SOFTIB_HELD)
			seq_printf(file, "switch%u hold\n", i);
		else
			seq_printf(file, "switch%u %u\n", i, delay_ms);
	}
	return 0;
}

static int mlids_show(struct seq_file *file, void *unused)
{
	seq_printf(file, "%u\n", READ_ONCE(softib.mlids));
	return 0;
}

#define WRITTEN(name)									\
	static ssize_t name##_write(struct file *file, const char __user *from, size_t length, loff_t *at)	\
	{										\
		return write_line(from, length, change_##name);				\
	}

#define SHOWN(name, writer)								\
	static int name##_open(struct inode *inode, struct file *file)			\
	{										\
		return single_open(file, name##_show, NULL);				\
	}										\
	static const struct file_operations name##_operations = {			\
		.owner = THIS_MODULE, .open = name##_open, .read = seq_read, .llseek = seq_lseek,	\
		.release = single_release, .write = writer,				\
	}

WRITTEN(links)
WRITTEN(drop)
WRITTEN(gsi)
WRITTEN(tables)
WRITTEN(mlids)
SHOWN(hcas, hcas_write);
SHOWN(links, links_write);
SHOWN(drop, drop_write);
SHOWN(gsi, gsi_write);
SHOWN(tables, tables_write);
SHOWN(mlids, mlids_write);
SHOWN(attached, NULL);

void softib_debug_create(void)
{
	folder = debugfs_create_dir("softib", NULL);
	debugfs_create_file("hcas", 0600, folder, NULL, &hcas_operations);
	debugfs_create_file("links", 0600, folder, NULL, &links_operations);
	debugfs_create_file("drop", 0600, folder, NULL, &drop_operations);
	debugfs_create_file("gsi", 0600, folder, NULL, &gsi_operations);
	debugfs_create_file("tables", 0600, folder, NULL, &tables_operations);
	debugfs_create_file("mlids", 0600, folder, NULL, &mlids_operations);
	debugfs_create_file("attached", 0400, folder, NULL, &attached_operations);
	debugfs_create_file("tap", 0400, folder, NULL, &softib_tap_operations);
}

/* An open file holds the module, so that no process is in one of them. */
void softib_debug_destroy(void)
{
	debugfs_remove(folder);
}
