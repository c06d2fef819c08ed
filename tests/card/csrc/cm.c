/* librdmacm: channels, ids, events. */
#include "inside.h"

#include <arpa/inet.h>
#include <infiniband/ib.h>
#include <stdio.h>

/* --- addresses --- */

/* Of 16 bytes: IPv4 addresses are mapped. */
void key_of(const struct sockaddr *address, uint8_t *key)
{
	memset(key, 0, KEY);
	if (address->sa_family == AF_INET) {
		key[10] = key[11] = 0xff;
		memcpy(key + 12, &((const struct sockaddr_in *)address)->sin_addr, 4);
	} else if (address->sa_family == AF_INET6) {
		memcpy(key, &((const struct sockaddr_in6 *)address)->sin6_addr, KEY);
	} else if (address->sa_family == AF_IB) {
		memcpy(key, &((const struct sockaddr_ib *)address)->sib_addr, KEY);
	}
}

static int index_in(uint8_t table[GIDS][16], const uint8_t *key)
{
	for (int i = 0; i < GIDS; i++)
		if (!memcmp(table[i], key, KEY))
			return i;
	return -1;
}

static void add_address(struct card_port *port, const uint8_t *key)
{
	static const uint8_t none[KEY];
	int place = index_in(port->addresses, key) < 0 ? index_in(port->addresses, none) : -1;

	if (place >= 0) {
		memcpy(port->addresses[place], key, KEY);
		memcpy(port->gids[place], key, KEY);
	}
}

/* The port that has the address; without one, the first port there is. */
static struct device *find_port(const uint8_t *key, uint8_t *number)
{
	for (int i = 0; i < MAX_DEVICES; i++)
		for (uint8_t port = 1; devices[i].used && !devices[i].gone && port <= devices[i].is.ports; port++) {
			struct card_port *one = port_of(&devices[i], port);

			if (key && one->any_address)
				add_address(one, key);
			if (key && index_in(one->addresses, key) < 0)
				continue;
			*number = port;
			return &devices[i];
		}
	return NULL;
}

static void bind_to(struct id *id, struct device *device, uint8_t number)
{
	int index = index_in(device->ports[number - 1].gids, id->address);

	if (!device->cm_context) {
		device->cm_context = new_context(device);
		device->cm_context->is_cm = 1;
	}
	id->sgid_index = index < 0 ? 0 : (uint8_t)index;
	id->id.port_num = number;
	id->id.route.addr.addr.ibaddr.pkey = htons(device->ports[number - 1].pkeys[0]);
	id->id.verbs = &device->cm_context->verbs.context;
	object_of(KIND_CONTEXT, id->id.verbs)->uses++;
	object_of(KIND_ID, id)->device = device;
}

/* --- channels and events --- */

struct rdma_event_channel *rdma_create_event_channel(void)
{
	int error = enter(CALL_rdma_create_event_channel, KIND_COUNT, NULL);
	struct event_channel *channel = NULL;

	if (!error) {
		channel = make(KIND_EVENT_CHANNEL, sizeof(*channel), NULL);
		open_bell(&channel->bell, 0);
		channel->channel.fd = channel->bell.fd;
		channel->last = &channel->first;
	}
	leave();
	errno = error ? error : errno;
	return channel ? &channel->channel : NULL;
}

void rdma_destroy_event_channel(struct rdma_event_channel *target)
{
	int error = enter(CALL_rdma_destroy_event_channel, KIND_EVENT_CHANNEL, target);

	/* the kernel ends what is left of it; an id that could not be destroyed is nobody's fault */
	for (struct object *object = first_object; object && error == EBUSY; object = object->next)
		if (object->kind == KIND_ID && ((struct id *)(object + 1))->id.channel == target && !object->refused)
			report("rdma_destroy_event_channel: id %u is left", object->serial);
	if (!error || error == EBUSY) {
		close_bell(&((struct event_channel *)target)->bell);
		end(KIND_EVENT_CHANNEL, target);
	}
	leave();
}

void tell(struct id *id, int type, int status, struct membership *membership)
{
	struct event_channel *channel = (struct event_channel *)id->id.channel;
	struct event *event = make(KIND_EVENT, sizeof(*event), NULL);
	struct rdma_ud_param *ud = &event->event.param.ud;

	event->event.id = &id->id;
	event->event.event = (enum rdma_cm_event_type)type;
	event->event.status = status;
	event->membership = membership;
	if (membership) {
		ud->private_data = membership->context;
		if (type == RDMA_CM_EVENT_MULTICAST_JOIN) {
			ud->ah_attr = membership->ah;
			ud->qp_num = MULTICAST_QP;
			ud->qkey = membership->qkey;
		}
	}
	*channel->last = event;
	channel->last = &event->next;
	ring(&channel->bell, 1);
}

/* Events of an id, or of one of its memberships, that nobody has read are gone with it. */
void forget_events(const struct id *id, const struct membership *membership)
{
	struct event_channel *channel = (struct event_channel *)id->id.channel;
	struct event **at = &channel->first;

	while (*at) {
		struct event *event = *at;

		if (event->event.id != &id->id || (membership && event->membership != membership)) {
			at = &event->next;
			continue;
		}
		*at = event->next;
		end(KIND_EVENT, event);
	}
	channel->last = at;
	ring(&channel->bell, channel->first != NULL);
}

/* librdmacm attaches the queue pair when the event of a join is read; a failure makes another event of it. */
static int attach_joined(struct event *event)
{
	struct membership *membership = event->membership;
	struct ibv_qp *qp = event->event.id->qp;
	int error;

	if (!qp || !membership->receives)
		return 0;
	error = attach(qp, &membership->ah.grh.dgid, membership->ah.dlid);
	membership->attached = !error;
	if (error) {
		event->event.event = RDMA_CM_EVENT_MULTICAST_ERROR;
		event->event.status = -1;
	}
	return error;
}

int rdma_get_cm_event(struct rdma_event_channel *target, struct rdma_cm_event **out)
{
	struct event_channel *channel = (struct event_channel *)target;
	int error = enter(CALL_rdma_get_cm_event, KIND_EVENT_CHANNEL, target);
	struct event *event;
	struct id *id;

	if (!error && await_bell(&channel->bell))
		error = errno;
	if (error)
		return result(error);
	event = channel->first;
	channel->first = event->next;
	if (!channel->first)
		channel->last = &channel->first;
	ring(&channel->bell, channel->first != NULL);
	id = (struct id *)event->event.id;
	object_of(KIND_ID, id)->unacked++;
	if (event->event.event == RDMA_CM_EVENT_ADDR_RESOLVED && !id->id.verbs)
		bind_to(id, id->target, id->target_port);
	if (event->event.event == RDMA_CM_EVENT_MULTICAST_JOIN && event->membership)
		error = attach_joined(event);
	if (event->event.event == RDMA_CM_EVENT_ADDR_ERROR && event->event.status == -1)
		error = ENODEV; /* librdmacm's own failure, when it looked at the address */
	*out = &event->event;
	leave();
	if (error)
		errno = error;
	return 0;
}

int rdma_ack_cm_event(struct rdma_cm_event *target)
{
	int error = enter(CALL_rdma_ack_cm_event, KIND_EVENT, target);

	if (!error) {
		object_of(KIND_ID, target->id)->unacked--;
		end(KIND_EVENT, target);
	}
	return result(error);
}

/* --- ids --- */

int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **out, void *user, enum rdma_port_space ps)
{
	int error = enter(CALL_rdma_create_id, KIND_EVENT_CHANNEL, channel);

	if (!error) {
		struct id *id = make(KIND_ID, sizeof(*id), NULL);

		id->id.channel = channel;
		id->id.context = user;
		id->id.ps = ps;
		id->last = &id->memberships;
		object_of(KIND_EVENT_CHANNEL, channel)->uses++;
		*out = &id->id;
	}
	return result(error);
}

int rdma_destroy_id(struct rdma_cm_id *target)
{
	int error = enter(CALL_rdma_destroy_id, KIND_ID, target);
	struct id *id = (struct id *)target;

	if (!error && object_of(KIND_EVENT_CHANNEL, target->channel)->magic == DEAD)
		error = EBADF;
	if (error)
		return result(error);
	settle_events(CALL_rdma_destroy_id, KIND_ID, target);
	if (target->qp && object_of(KIND_QP, target->qp)->magic == ALIVE)
		report("rdma_destroy_id: id %u has a queue pair", object_of(KIND_ID, target)->serial);
	forget_events(id, NULL);
	while (id->memberships) {
		struct membership *one = id->memberships;

		id->memberships = one->next;
		free(one);
	}
	if (target->verbs)
		object_of(KIND_CONTEXT, target->verbs)->uses--;
	object_of(KIND_EVENT_CHANNEL, target->channel)->uses--;
	end(KIND_ID, target);
	return result(0);
}

int rdma_bind_addr(struct rdma_cm_id *target, struct sockaddr *address)
{
	int error = enter(CALL_rdma_bind_addr, KIND_ID, target);
	struct id *id = (struct id *)target;
	struct device *device = NULL;
	uint8_t key[KEY], number = 0;

	if (!error && (target->verbs || id->target))
		error = EINVAL;
	if (!error) {
		key_of(address, key);
		device = find_port(key, &number);
		error = device ? 0 : EADDRNOTAVAIL;
	}
	if (!error) {
		memcpy(id->address, key, KEY);
		bind_to(id, device, number);
	}
	return result(error);
}

int rdma_resolve_addr(struct rdma_cm_id *target, struct sockaddr *source, struct sockaddr *destination, int timeout)
{
	int error = enter(CALL_rdma_resolve_addr, KIND_ID, target);
	struct id *id = (struct id *)target;
	struct answer answer;

	(void)destination, (void)timeout;
	if (error)
		return result(error);
	if (source)
		key_of(source, id->address);
	if (target->verbs) {
		id->target = object_of(KIND_ID, id)->device;
		id->target_port = target->port_num;
	} else {
		id->target = find_port(source ? id->address : NULL, &id->target_port);
	}
	if (!id->target)
		return result(source ? EADDRNOTAVAIL : ENODEV);
	if (!source && !target->verbs)
		memcpy(id->address, id->target->ports[id->target_port - 1].addresses[0], KEY);
	answer = answer_to(0, RDMA_CM_EVENT_ADDR_RESOLVED);
	if (answer.event != NO_EVENT)
		tell(id, answer.event, answer.status, NULL);
	return result(0);
}

int rdma_set_option(struct rdma_cm_id *target, int level, int option, void *value, size_t size)
{
	int error = enter(CALL_rdma_set_option, KIND_ID, target);

	if (!error && level == RDMA_OPTION_ID && option == RDMA_OPTION_ID_TOS) {
		if (size == sizeof(uint8_t))
			((struct id *)target)->tos = *(uint8_t *)value;
		else
			error = EINVAL;
	}
	return result(error);
}

/* --- queue pairs --- */

uint32_t qkey_of(const struct id *id)
{
	const struct device *device = object_of(KIND_ID, id)->device;
	uint32_t qkey = device->ports[id->id.port_num - 1].group_qkey;

	return qkey ? qkey : UDP_QKEY;
}

int rdma_create_qp_ex(struct rdma_cm_id *target, struct ibv_qp_init_attr_ex *init)
{
	int error = enter(CALL_rdma_create_qp, KIND_ID, target);
	struct qp *qp;

	if (!error && (!target->verbs || target->qp || !(init->comp_mask & IBV_QP_INIT_ATTR_PD)))
		error = EINVAL;
	if (error)
		return result(error);
	qp = (struct qp *)new_qp(init->pd, init);
	if (!qp)
		return result(errno);
	qp->port = target->port_num;
	qp->qkey = qkey_of((struct id *)target);
	qp->state = qp->qp.state = init->qp_type == IBV_QPT_UD ? IBV_QPS_RTS : IBV_QPS_INIT;
	target->qp = &qp->qp;
	target->pd = init->pd;
	return result(0);
}

int rdma_create_qp(struct rdma_cm_id *target, struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
	struct ibv_qp_init_attr_ex same = { .send_cq = init->send_cq, .recv_cq = init->recv_cq, .cap = init->cap,
					    .qp_type = init->qp_type, .comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd };
	int ret = rdma_create_qp_ex(target, &same);

	init->cap = same.cap;
	return ret;
}

/* It tells nothing, and forgets the queue pair whether it is gone or not. */
void rdma_destroy_qp(struct rdma_cm_id *target)
{
	int error = enter(CALL_rdma_destroy_qp, KIND_ID, target);

	if (error && target->qp)
		object_of(KIND_QP, target->qp)->refused = 1;
	else if (target->qp)
		error = end_qp(target->qp);
	else
		report("rdma_destroy_qp: id %u has no queue pair", object_of(KIND_ID, target)->serial);
	target->qp = NULL;
	leave();
	if (error)
		errno = error;
}

int rdma_init_qp_attr(struct rdma_cm_id *target, struct ibv_qp_attr *attr, int *mask)
{
	int error = enter(CALL_rdma_init_qp_attr, KIND_ID, target);

	if (!error && !target->verbs)
		error = EINVAL;
	if (!error) {
		attr->pkey_index = 0;
		attr->port_num = target->port_num;
		attr->qkey = qkey_of((struct id *)target);
		*mask = IBV_QP_STATE;
		if (attr->qp_state == IBV_QPS_INIT)
			*mask |= IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
	}
	return result(error);
}

/* --- devices --- */

struct ibv_context **rdma_get_devices(int *count)
{
	int error = enter(CALL_rdma_get_devices, KIND_COUNT, NULL);
	struct ibv_context **list = error ? NULL : calloc(MAX_DEVICES + 1, sizeof(*list));
	int found = 0;

	close_dead_contexts();
	for (int i = 0; list && i < MAX_DEVICES; i++) {
		if (!devices[i].used || devices[i].gone)
			continue;
		if (!devices[i].cm_context) {
			devices[i].cm_context = new_context(&devices[i]);
			devices[i].cm_context->is_cm = 1;
		}
		list[found++] = &devices[i].cm_context->verbs.context;
	}
	if (count)
		*count = found;
	leave();
	errno = error ? error : errno;
	return list;
}

void rdma_free_devices(struct ibv_context **list)
{
	free(list);
}

const char *rdma_event_str(enum rdma_cm_event_type event)
{
	static __thread char text[32];

	snprintf(text, sizeof(text), "event %d", (int)event);
	return text;
}

/* --- what a test lets happen --- */

/* To each id that is bound to the address (NULL: to each id); multicast events to each membership of it, or to that
 * of one group. How many events there were. */
int card_cm_event(const uint8_t *address, int type, int status, const uint8_t *group)
{
	int is_multicast = type == RDMA_CM_EVENT_MULTICAST_JOIN || type == RDMA_CM_EVENT_MULTICAST_ERROR;
	int count = 0;

	pthread_mutex_lock(&card_lock);
	for (struct object *object = first_object; object; object = object->next) {
		struct id *id = (struct id *)(object + 1);

		if (object->kind != KIND_ID || (address && memcmp(id->address, address, KEY)))
			continue;
		if (!is_multicast) {
			tell(id, type, status, NULL);
			count++;
			continue;
		}
		for (struct membership *one = id->memberships; one; one = one->next)
			if (!one->is_left && (!group || !memcmp(one->key, group, KEY))) {
				tell(id, type, status, one);
				count++;
			}
	}
	pthread_mutex_unlock(&card_lock);
	return count;
}

static void break_channels(const struct device *device)
{
	for (struct object *object = first_object; object; object = object->next)
		if (object->device == device && object->kind == KIND_COMP_CHANNEL)
			break_bell(&((struct comp_channel *)(object + 1))->events.bell);
}

void card_break_channels(int number)
{
	pthread_mutex_lock(&card_lock);
	break_channels(&devices[number]);
	pthread_mutex_unlock(&card_lock);
}

/* The device goes. `disassociated`: the kernel does not wait until it is let go; it answers EIO from now on, and
 * there is an error on each completion channel. */
void card_remove(int number, int disassociated)
{
	struct device *device = &devices[number];

	pthread_mutex_lock(&card_lock);
	raise_async(device, (struct ibv_async_event){ .event_type = IBV_EVENT_DEVICE_FATAL }, NULL, NULL);
	device->gone = 1;
	device->disassociated = disassociated;
	for (struct object *object = first_object; object; object = object->next) {
		if (object->device != device)
			continue;
		if (object->kind == KIND_ID)
			tell((struct id *)(object + 1), RDMA_CM_EVENT_DEVICE_REMOVAL, 0, NULL);
		if (object->kind == KIND_CONTEXT)
			((struct context *)(object + 1))->is_dead = 1;
	}
	if (disassociated)
		break_channels(device);
	pthread_mutex_unlock(&card_lock);
}

/* A device of that name comes back: a new one, for whoever still has the old. Its number. */
int card_restore(int number)
{
	int found = -1;

	pthread_mutex_lock(&card_lock);
	for (int i = 0; i < MAX_DEVICES && found < 0; i++)
		if (!devices[i].used) {
			devices[i] = devices[number];
			devices[i].gone = devices[i].disassociated = 0;
			devices[i].cm_context = NULL;
			found = i;
		}
	pthread_mutex_unlock(&card_lock);
	return found;
}
