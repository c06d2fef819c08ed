/* Devices, ports, GIDs, and the addresses of network interfaces. Every call asks, and keeps nothing: no lock, no wait. */
#include "dynload.h"

#include <endian.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>

int mcast_device_names(char (*names)[64], uint32_t max)
{
	struct ibv_device **list;
	int count = 0;

	errno = 0;
	list = mcast_sym.ibv_get_device_list(&count);
	if (!list)
		return errno == ENOSYS ? 0 : -(errno ? errno : EIO); /* ENOSYS: no RDMA in this kernel */
	for (count = 0; list[count] && (uint32_t)count < max; count++)
		snprintf(names[count], sizeof(names[count]), "%s", mcast_sym.ibv_get_device_name(list[count]));
	mcast_sym.ibv_free_device_list(list);
	return count;
}

int mcast_open_device(const char *name, struct ibv_context **context)
{
	struct ibv_device **list = mcast_sym.ibv_get_device_list(NULL);
	int ret = -ENODEV;

	if (!list)
		return -errno;
	for (int i = 0; list[i] && ret == -ENODEV; i++) {
		if (strcmp(mcast_sym.ibv_get_device_name(list[i]), name))
			continue;
		errno = 0;
		*context = mcast_sym.ibv_open_device(list[i]);
		ret = *context ? 0 : -(errno ? errno : EIO);
	}
	mcast_sym.ibv_free_device_list(list);
	return ret;
}

void mcast_close_device(struct ibv_context **context)
{
	if (*context)
		mcast_sym.ibv_close_device(*context);
	*context = NULL;
}

/* Drivers give what they cannot say as a negative number. */
static uint32_t limit_of(int number)
{
	return number > 0 ? (uint32_t)number : 0;
}

int mcast_query_device(struct ibv_context *context, struct mcast_device *device)
{
	struct ibv_device_attr attr;
	int ret = mcast_returned(mcast_sym.ibv_query_device(context, &attr));

	if (ret)
		return ret;
	snprintf(device->name, sizeof(device->name), "%s", mcast_sym.ibv_get_device_name(context->device));
	device->node_guid = be64toh(attr.node_guid);
	device->max_mcast_grp = limit_of(attr.max_mcast_grp);
	device->max_mcast_qp_attach = limit_of(attr.max_mcast_qp_attach);
	device->max_qp_wr = limit_of(attr.max_qp_wr);
	device->ports = attr.phys_port_cnt;
	return 0;
}

enum { MAX_GIDS_OF_PORT = 65536 }; /* as many as a GID index has values in the kernel's interface */

/* Attributes that a port is queried for. Newer libraries write speeds beyond 8 bits behind the fields of these headers. */
union port_attr {
	struct ibv_port_attr is;
	struct {
		uint8_t known[52];
		uint32_t active_speed_ex;
	} newer;
};

_Static_assert(offsetof(struct ibv_port_attr, port_cap_flags2) == 48, "the last field before active_speed_ex");

/* The header's inline does the same, but falls back to a linked symbol. */
static int query_port(struct ibv_context *context, uint8_t port, union port_attr *attr)
{
	struct verbs_context *extended = verbs_get_ctx_op(context, query_port);

	memset(attr, 0, sizeof(*attr));
	if (extended)
		return mcast_returned(extended->query_port(context, port, &attr->is, sizeof(*attr)));
	return mcast_returned(mcast_sym.ibv_query_port(context, port, (struct _compat_ibv_port_attr *)attr));
}

/* Gbit/s of one lane (enum ib_port_speed of Linux; the last is XDR). */
static double lane_rate(unsigned int speed)
{
	static const struct {
		unsigned int speed;
		double rate;
	} rates[] = { { 1, 2.5 }, { 2, 5 }, { 4, 10 }, { 8, 10.3125 }, { 16, 14.0625 },
		      { 32, 25.78125 }, { 64, 53.125 }, { 128, 106.25 }, { 256, 212.5 } };

	for (size_t i = 0; i < sizeof(rates) / sizeof(*rates); i++)
		if (rates[i].speed == speed)
			return rates[i].rate;
	return 0;
}

/* Lanes (IBA PortInfo.LinkWidthActive). */
static unsigned int lanes(unsigned int width)
{
	return width == 16 ? 2 : width == 2 ? 4 : width == 4 ? 8 : width == 8 ? 12 : 1;
}

/* A code that does not exist counts as the nearest that does. */
static uint32_t mtu_bytes(enum ibv_mtu mtu)
{
	return 128u << (mtu < IBV_MTU_256 ? IBV_MTU_256 : mtu > IBV_MTU_4096 ? IBV_MTU_4096 : mtu);
}

int mcast_query_port(struct ibv_context *context, uint32_t port, struct mcast_port *out)
{
	union port_attr found;
	const struct ibv_port_attr *attr = &found.is;
	int ret = query_port(context, (uint8_t)port, &found);

	if (ret)
		return ret;
	out->state = attr->state;
	out->is_ethernet = attr->link_layer == IBV_LINK_LAYER_ETHERNET;
	out->active_mtu = mtu_bytes(attr->active_mtu);
	out->max_mtu = mtu_bytes(attr->max_mtu);
	out->lid = attr->lid;
	out->gids = attr->gid_tbl_len < MAX_GIDS_OF_PORT ? limit_of(attr->gid_tbl_len) : MAX_GIDS_OF_PORT;
	out->qkey_violations = attr->qkey_viol_cntr;
	out->rate = lane_rate(found.newer.active_speed_ex ? found.newer.active_speed_ex : attr->active_speed) *
		    lanes(attr->active_width);
	return 0;
}

int mcast_query_gid(struct ibv_context *context, uint32_t port, uint32_t index, uint8_t *gid)
{
	union ibv_gid found;

	errno = 0;
	if (mcast_sym.ibv_query_gid(context, (uint8_t)port, (int)index, &found))
		return -(errno ? errno : EINVAL);
	memcpy(gid, found.raw, sizeof(found.raw));
	return 0;
}

static int gids_by_table(struct ibv_context *context, struct mcast_gid *out, uint32_t max)
{
	struct ibv_gid_entry *entries = calloc(max, sizeof(*entries));
	ssize_t count;

	if (!entries)
		return -ENOMEM;
	count = mcast_sym._ibv_query_gid_table(context, entries, max, 0, sizeof(*entries));
	count = count <= (ssize_t)max ? count : (ssize_t)max; /* an entry that was not written has port 0, which no device has */
	for (ssize_t i = 0; i < count; i++) {
		out[i] = (struct mcast_gid){ entries[i].port_num, entries[i].gid_index, entries[i].ndev_ifindex, { 0 } };
		memcpy(out[i].gid, entries[i].gid.raw, sizeof(out[i].gid));
	}
	free(entries);
	return (int)count;
}

static int gids_one_by_one(struct ibv_context *context, struct mcast_gid *out, uint32_t max)
{
	static const uint8_t none[16];
	struct mcast_device device;
	struct mcast_port attr;
	uint32_t count = 0;
	int ret = mcast_query_device(context, &device);

	for (uint32_t port = 1; !ret && port <= device.ports; port++) {
		ret = mcast_query_port(context, port, &attr);
		for (uint32_t index = 0; !ret && index < attr.gids && count < max; index++) {
			out[count] = (struct mcast_gid){ port, index, 0, { 0 } };
			if (!mcast_query_gid(context, port, index, out[count].gid) &&
			    memcmp(out[count].gid, none, sizeof(none)))
				count++;
		}
	}
	return ret ? ret : (int)count;
}

/* The GIDs that are set, of all ports. */
int mcast_query_gids(struct ibv_context *context, struct mcast_gid *out, uint32_t max)
{
	int ret = mcast_sym._ibv_query_gid_table ? gids_by_table(context, out, max) : -EOPNOTSUPP;

	return ret == -EOPNOTSUPP ? gids_one_by_one(context, out, max) : ret;
}

static uint32_t copy_address(const struct sockaddr *address, uint8_t *out)
{
	if (address && address->sa_family == AF_INET) {
		memcpy(out, &((const struct sockaddr_in *)address)->sin_addr, 4);
		return 4;
	}
	if (address && address->sa_family == AF_INET6) {
		memcpy(out, &((const struct sockaddr_in6 *)address)->sin6_addr, 16);
		return 16;
	}
	return 0;
}

int mcast_netdev_addresses(struct mcast_netdev_address *out, uint32_t max)
{
	struct ifaddrs *all;
	uint32_t count = 0;

	if (getifaddrs(&all))
		return -errno;
	for (struct ifaddrs *one = all; one && count < max; one = one->ifa_next) {
		out[count].bytes = copy_address(one->ifa_addr, out[count].address);
		if (!out[count].bytes)
			continue;
		snprintf(out[count].netdev, sizeof(out[count].netdev), "%s", one->ifa_name);
		count++;
	}
	freeifaddrs(all);
	return (int)count;
}

int mcast_comp_vectors(struct ibv_context *context)
{
	return context->num_comp_vectors > 1 ? context->num_comp_vectors : 1;
}

/* librdmacm closes the context of a removed device only when it looks at the list again. */
int mcast_sync_devices(void)
{
	struct ibv_context **list = mcast_sym.rdma_get_devices(NULL);

	if (!list)
		return -errno;
	mcast_sym.rdma_free_devices(list);
	return 0;
}
