// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * What root may do to the fabric, and see of it, in /sys/kernel/debug/softib:
 *   links     each cable and the states of its ends; "softib2 out", "switch1/3 in" take it out and put it in
 *   drop      "softib2 10" loses every tenth message that arrives there; 0 ends that. Shown: port, its state, number
 *   attached  the queue pairs in groups: HCA, number, MGID, MLID
 */
#include <linux/debugfs.h>
#include <linux/module.h>
#include <linux/seq_file.h>
#include <linux/uaccess.h>

#include "softib.h"

#define LINE 64

static struct dentry *folder;

/* The port that a line begins with, and what follows; NULL if there is none. The caller has softib.lock. */
static struct softib_port *named(const char *line, char *rest)
{
	unsigned int number, port;

	if (sscanf(line, "softib%u %15s", &number, rest) == 2)
		return number && number <= softib.hcas ? &softib.hca[number - 1]->port[1] : NULL;
	if (sscanf(line, "switch%u/%u %15s", &number, &port, rest) == 3)
		return number < softib.switches && port && port <= softib.sw[number]->node.ports ?
			&softib.sw[number]->port[port] : NULL;
	return NULL;
}

/* Whether there is such a line: 0, or -EINVAL. */
static int change(const char *line, bool cable)
{
	struct softib_port *port;
	unsigned long flags;
	char rest[16];
	u32 every = 0;
	int error = -EINVAL;

	spin_lock_irqsave(&softib.lock, flags);
	port = named(line, rest);
	if (port && cable && (!strcmp(rest, "in") || !strcmp(rest, "out"))) {
		softib_plug(port, !strcmp(rest, "in"));
		error = 0;
	} else if (port && !cable && !kstrtou32(rest, 10, &every)) {
		port->drop_every = every;
		port->received = 0;
		error = 0;
	}
	spin_unlock_irqrestore(&softib.lock, flags);
	return error;
}

static ssize_t write_line(const char __user *from, size_t length, bool cable)
{
	char line[LINE];
	int error;

	if (length >= sizeof(line))
		return -EINVAL;
	if (copy_from_user(line, from, length))
		return -EFAULT;
	line[length] = 0;
	error = change(line, cable);
	return error ? error : length;
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
	if (!port->drop_every)
		return;
	show_port(file, port);
	seq_printf(file, " %u\n", port->drop_every);
}

static int drop_show(struct seq_file *file, void *unused)
{
	unsigned int i, number;

	for (i = 0; i < softib.hcas; i++)
		show_drop(file, &softib.hca[i]->port[1]);
	for (i = 0; i < softib.switches; i++)
		for (number = 1; number <= softib.sw[i]->node.ports; number++)
			show_drop(file, &softib.sw[i]->port[number]);
	return 0;
}

static int attached_show(struct seq_file *file, void *unused)
{
	const struct softib_attachment *one;
	unsigned int i;

	rcu_read_lock();
	for (i = 0; i < softib.hcas; i++)
		list_for_each_entry_rcu(one, &softib.hca[i]->attached, list)
			seq_printf(file, "softib%u %u %pI6 0x%04x\n", i + 1, one->qp->ibqp.qp_num, &one->mgid,
				   one->mlid);
	rcu_read_unlock();
	return 0;
}

static ssize_t links_write(struct file *file, const char __user *from, size_t length, loff_t *at)
{
	return write_line(from, length, true);
}

static ssize_t drop_write(struct file *file, const char __user *from, size_t length, loff_t *at)
{
	return write_line(from, length, false);
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

SHOWN(links, links_write);
SHOWN(drop, drop_write);
SHOWN(attached, NULL);

void softib_debug_create(void)
{
	folder = debugfs_create_dir("softib", NULL);
	debugfs_create_file("links", 0600, folder, NULL, &links_operations);
	debugfs_create_file("drop", 0600, folder, NULL, &drop_operations);
	debugfs_create_file("attached", 0400, folder, NULL, &attached_operations);
}

/* Waits until no process reads or writes one of the files. */
void softib_debug_destroy(void)
{
	debugfs_remove(folder);
}
