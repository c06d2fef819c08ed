/* librdmacm: joining and leaving, and how a test lets that be answered. */
#include "inside.h"

#include <infiniband/ib.h>

enum { MAX_ANSWERS = 64, MAX_GROUPS = 4096, FIRST_MLID = 0xc000 };

/* --- the script: how a join, or resolving an address, is answered --- */

static struct answer answers[2][MAX_ANSWERS];
static int answer_counts[2];

/* The `nth` resolve (0) or join (1) from now on ends with this event (-1: with none) and status. */
int card_answer(int join, int nth, int event, int status)
{
	int ret = -1;

	pthread_mutex_lock(&card_lock);
	if (answer_counts[join] < MAX_ANSWERS) {
		answers[join][answer_counts[join]++] = (struct answer){ nth, event, status };
		ret = 0;
	}
	pthread_mutex_unlock(&card_lock);
	return ret;
}

void forget_answers(void)
{
	memset(answer_counts, 0, sizeof(answer_counts));
}

struct answer answer_to(int join, int usual)
{
	struct answer found = { 0, usual, 0 };

	for (int i = 0; i < answer_counts[join]; i++) {
		struct answer *one = &answers[join][i];

		if (one->nth-- == 1)
			found = *one;
	}
	return found;
}

/* --- memberships --- */

static uint16_t mlid_of(const uint8_t *mgid)
{
	static uint8_t mgids[MAX_GROUPS][KEY];
	static int count;
	int place = 0;

	while (place < count && memcmp(mgids[place], mgid, KEY))
		place++;
	if (place == count && count < MAX_GROUPS)
		memcpy(mgids[count++], mgid, KEY);
	return (uint16_t)(FIRST_MLID + place);
}

/* Map as the kernel does: RoCE takes the address itself; IPoIB's mapping has the P_Key in it, and for the port
 * space UDP another signature. */
static void mgid_of(const struct id *id, const struct card_port *port, const struct sockaddr *address, uint8_t *mgid)
{
	int is_udp = id->id.ps == RDMA_PS_UDP;
	uint8_t key[KEY];

	key_of(address, key);
	memcpy(mgid, key, KEY);
	if (port->link_layer == IBV_LINK_LAYER_ETHERNET || address->sa_family == AF_IB)
		return;
	if (address->sa_family == AF_INET6 && key[0] == 0xff && (key[1] & 0xf0) == 0x10 && key[2] == 0xa0 &&
	    key[3] == 0x1b)
		return;
	memset(mgid, 0, KEY);
	mgid[0] = 0xff;
	mgid[1] = 0x12;
	mgid[4] = (uint8_t)(port->pkeys[0] >> 8 | 0x80);
	mgid[5] = (uint8_t)port->pkeys[0];
	if (address->sa_family == AF_INET) {
		mgid[2] = 0x40;
		mgid[3] = is_udp ? 0x01 : 0x1b;
		memcpy(mgid + 12, key + 12, 4);
		mgid[12] &= 0x0f;
	} else {
		mgid[1] = 0x10 | (key[1] & 0x0f);
		mgid[2] = 0x60;
		mgid[3] = is_udp ? 0x01 : 0x1b;
		memcpy(mgid + 6, key + 6, 10);
	}
}

static void address_group(struct membership *one, const struct id *id, const struct sockaddr *address)
{
	const struct card_port *port = &object_of(KIND_ID, id)->device->ports[id->id.port_num - 1];
	struct ibv_ah_attr *ah = &one->ah;

	mgid_of(id, port, address, ah->grh.dgid.raw);
	ah->is_global = 1;
	ah->port_num = id->id.port_num;
	ah->grh.sgid_index = id->sgid_index;
	ah->grh.flow_label = port->group_flow_label;
	ah->grh.hop_limit = (uint8_t)port->group_hop_limit;
	ah->grh.traffic_class = id->tos;
	ah->static_rate = (uint8_t)port->group_rate;
	ah->sl = (uint8_t)port->group_sl;
	if (port->link_layer != IBV_LINK_LAYER_ETHERNET)
		ah->dlid = mlid_of(ah->grh.dgid.raw);
	one->qkey = qkey_of(id);
}

static int join(struct rdma_cm_id *target, const struct sockaddr *address, void *user, int receives)
{
	int error = enter(CALL_rdma_join_multicast, KIND_ID, target);
	struct id *id = (struct id *)target;
	struct membership *one;
	struct answer answer;

	if (!error && !target->verbs)
		error = EINVAL;
	if (!error && object_of(KIND_ID, id)->device->gone)
		error = ENODEV;
	if (error)
		return result(error);
	one = calloc(1, sizeof(*one));
	one->context = user;
	one->receives = receives;
	key_of(address, one->key);
	address_group(one, id, address);
	*id->last = one;
	id->last = &one->next;
	answer = answer_to(1, RDMA_CM_EVENT_MULTICAST_JOIN);
	if (answer.event != NO_EVENT)
		tell(id, answer.event, answer.status, one);
	return result(0);
}

int rdma_join_multicast(struct rdma_cm_id *target, struct sockaddr *address, void *user)
{
	return join(target, address, user, 1);
}

int rdma_join_multicast_ex(struct rdma_cm_id *target, struct rdma_cm_join_mc_attr_ex *attr, void *user)
{
	if (attr->comp_mask != (RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS)) {
		errno = EINVAL;
		return -1;
	}
	return join(target, attr->addr, user, attr->join_flags == RDMA_MC_JOIN_FLAG_FULLMEMBER);
}

/* librdmacm forgets the membership first, then detaches, whatever comes of that, then tells the kernel, which may
 * refuse. */
int rdma_leave_multicast(struct rdma_cm_id *target, struct sockaddr *address)
{
	int error = hold(CALL_rdma_leave_multicast, KIND_ID, target);
	struct membership **at = error ? NULL : &((struct id *)target)->memberships;
	uint8_t key[KEY];
	struct membership *one;

	if (error)
		return result(error);
	key_of(address, key);
	while (*at && ((*at)->is_left || memcmp((*at)->key, key, KEY)))
		at = &(*at)->next;
	one = *at;
	if (!one)
		return result(EADDRNOTAVAIL);
	if (one->attached && target->qp)
		detach(target->qp, &one->ah.grh.dgid, one->ah.dlid);
	error = fault(CALL_rdma_leave_multicast, NULL, NULL);
	forget_events((struct id *)target, one);
	settle_events(CALL_rdma_leave_multicast, KIND_ID, target);
	if (error) {
		one->is_left = 1;
	} else {
		*at = one->next;
		if (!one->next)
			((struct id *)target)->last = at;
		free(one);
	}
	return result(error);
}
