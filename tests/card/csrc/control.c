/* Control of the card by a test: devices, asynchronous events, delays. */
#include "inside.h"

#include <stdio.h>

struct device devices[MAX_DEVICES];
struct qp *all_qps;
int64_t delays[STAGES];

/* --- devices --- */

struct card_port *port_of(struct device *device, uint8_t port)
{
	return port && port <= device->is.ports ? &device->ports[port - 1] : NULL;
}

struct qp *find_qp(uint32_t qp_num)
{
	struct qp *qp = all_qps;

	while (qp && qp->qp.qp_num != qp_num)
		qp = qp->next;
	return qp;
}

/* The number of the new device; -1 if there are too many. */
int card_add_device(const struct card_device *wanted, const struct card_port *ports)
{
	int number = -1;

	pthread_mutex_lock(&card_lock);
	for (int i = 0; i < MAX_DEVICES && number < 0; i++) {
		struct device *device = &devices[i];

		if (device->used || wanted->ports > MAX_PORTS)
			continue;
		memset(device, 0, sizeof(*device));
		device->ibv.node_type = IBV_NODE_CA;
		device->ibv.transport_type = IBV_TRANSPORT_IB;
		snprintf(device->ibv.name, sizeof(device->ibv.name), "%s", wanted->name);
		device->is = *wanted;
		memcpy(device->ports, ports, wanted->ports * sizeof(*ports));
		device->used = 1;
		number = i;
	}
	pthread_mutex_unlock(&card_lock);
	return number;
}

void card_set_port(int number, int port, const struct card_port *wanted)
{
	pthread_mutex_lock(&card_lock);
	devices[number].ports[port - 1] = *wanted;
	pthread_mutex_unlock(&card_lock);
}

void card_get_port(int number, int port, struct card_port *out)
{
	pthread_mutex_lock(&card_lock);
	*out = devices[number].ports[port - 1];
	pthread_mutex_unlock(&card_lock);
}

/* A device for who sets nothing: benchmarks. Every address is its own. */
static void add_usual_device(void)
{
	struct card_device device = { .name = "null0", .guid = 1, .ports = 1, .max_qp_wr = 1024,
				      .max_mcast_grp = 8192, .max_mcast_qp_attach = 56, .max_inline = 256, .max_send_sge = 4,
				      .comp_vectors = 1 };
	struct card_port port = { .link_layer = IBV_LINK_LAYER_ETHERNET, .state = IBV_PORT_ACTIVE,
				  .active_mtu = IBV_MTU_1024, .max_mtu = IBV_MTU_4096, .active_speed = 1,
				  .active_width = 1, .any_address = 1, .pkeys = { 0xffff } };

	card_add_device(&device, &port);
}

/* Without a script: MCAST_CARD_DELAY is how many nanoseconds later a send is seen to be complete. */
__attribute__((constructor)) static void set_up(void)
{
	const char *delay = getenv("MCAST_CARD_DELAY");

	delays[STAGE_SEND] = delay ? atoll(delay) : 0;
	add_usual_device();
}

/* Forget the script, the reports, the devices and what is left: a new card. */
void card_reset(int with_usual_device)
{
	pthread_mutex_lock(&card_lock);
	forget_objects();
	forget_script();
	forget_answers();
	forget_regions();
	forget_armed();
	all_qps = NULL;
	memset(devices, 0, sizeof(devices));
	memset(delays, 0, sizeof(delays));
	pthread_mutex_unlock(&card_lock);
	if (with_usual_device)
		add_usual_device();
}

/* --- asynchronous events --- */

void raise_async(struct device *device, struct ibv_async_event event, const void *about, const struct context *only)
{
	struct node node = { .async = event, .about = (void *)(uintptr_t)about };

	for (struct object *object = first_object; object; object = object->next) {
		struct context *context = (struct context *)(object + 1);

		if (object->kind == KIND_CONTEXT && object->device == device && (!only || only == context))
			put(&context->async, node);
	}
}

/* An event of a port: each context of the device gets it. */
void card_port_event(int number, int port, int type)
{
	struct card_port *at = &devices[number].ports[port - 1];

	pthread_mutex_lock(&card_lock);
	if (type == IBV_EVENT_PORT_ERR)
		at->state = IBV_PORT_DOWN;
	if (type == IBV_EVENT_PORT_ACTIVE)
		at->state = IBV_PORT_ACTIVE;
	raise_async(&devices[number], (struct ibv_async_event){ .event_type = (enum ibv_event_type)type,
								.element.port_num = port }, NULL, NULL);
	pthread_mutex_unlock(&card_lock);
}

/* An event of a queue pair, or of its queues (1: of sends, 2: of receives). -1: there is no such queue pair. */
int card_qp_event(uint32_t qp_num, int queue, int type)
{
	struct ibv_async_event event = { .event_type = (enum ibv_event_type)type };
	struct qp *qp;

	pthread_mutex_lock(&card_lock);
	qp = find_qp(qp_num);
	if (qp) {
		if (queue)
			event.element.cq = queue == 1 ? qp->qp.send_cq : qp->qp.recv_cq;
		else
			event.element.qp = &qp->qp;
		if (type == IBV_EVENT_QP_FATAL)
			fail_qp(qp);
		raise_async(object_of(KIND_QP, qp)->device, event, event.element.qp,
			    container_of(qp->qp.context, struct context, verbs.context));
	}
	pthread_mutex_unlock(&card_lock);
	return qp ? 0 : -1;
}

/* --- queue pairs --- */

int card_qps(struct card_qp *out, int most)
{
	int count = 0;

	pthread_mutex_lock(&card_lock);
	for (struct qp *qp = all_qps; qp && count < most; qp = qp->next) {
		const struct cq *cqs[2] = { (struct cq *)qp->qp.send_cq, (struct cq *)qp->qp.recv_cq };
		struct card_qp *one = &out[count++];

		*one = (struct card_qp){ .qp_num = qp->qp.qp_num, .state = qp->state, .sent = qp->sent,
					 .receives = (uint32_t)(qp->posted - qp->taken), .dropped = qp->dropped,
					 .attachments = qp->attached };
		for (int stage = 0; stage < STAGES; stage++)
			one->kept[stage] = (uint32_t)count_work(qp, (enum stage)stage);
		for (int i = 0; i < 2; i++) {
			one->moderation[i][0] = cqs[i]->moderation.cq_count;
			one->moderation[i][1] = cqs[i]->moderation.cq_period;
			one->vectors[i] = cqs[i]->vector;
		}
	}
	pthread_mutex_unlock(&card_lock);
	return count;
}

/* From now on, what passes this stage waits so many nanoseconds; -1: until it is released. 0: of every queue pair. */
int card_delay(uint32_t qp_num, int stage, int64_t nanoseconds)
{
	struct qp *qp;

	pthread_mutex_lock(&card_lock);
	qp = qp_num ? find_qp(qp_num) : NULL;
	if (qp)
		qp->delay[stage] = nanoseconds;
	else if (!qp_num)
		delays[stage] = nanoseconds;
	pthread_mutex_unlock(&card_lock);
	return qp || !qp_num ? 0 : -1;
}

/* Lets go what waits at this place of the stage (-1: all). How much waited; -1: there is no such queue pair. */
int card_release(uint32_t qp_num, int stage, int index)
{
	struct qp *qp;
	int count;

	pthread_mutex_lock(&card_lock);
	qp = find_qp(qp_num);
	count = qp ? release_work(qp, (enum stage)stage, index) : -1;
	pthread_mutex_unlock(&card_lock);
	return count;
}

/* A message out of nowhere. 0; 1: no receive was there for it; -1: there is no such queue pair. */
int card_inject(uint32_t qp_num, const struct card_message *message, const void *payload, uint32_t length)
{
	struct qp *qp;
	int ret = -1;

	pthread_mutex_lock(&card_lock);
	qp = find_qp(qp_num);
	if (qp)
		ret = inject(qp, message, payload, length) ? 1 : 0;
	pthread_mutex_unlock(&card_lock);
	return ret;
}
