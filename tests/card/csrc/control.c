/* The script, the objects that there are, and what was done wrong with them. What a test calls is named card_*. */
#include "inside.h"

#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

enum { KEPT_DEAD = 256, MOST_FAULTS = 64, REPORT_BYTES = 16384,
       MOST_SECONDS = 10 };

pthread_mutex_t card_lock = PTHREAD_MUTEX_INITIALIZER;

struct device devices[MOST_DEVICES];
struct qp *all_qps;
int64_t delays[STAGES];

#define CALL_NAME(name, flags) { #name, flags },
static const struct {
	const char *name;
	int flags;
} calls[] = { CALLS(CALL_NAME) };
#undef CALL_NAME

#define KIND_NAME(name, text) text,
static const char *const kind_names[] = { KINDS(KIND_NAME) };
#undef KIND_NAME

/* --- the script --- */

/* The `nth` call from now on, and `times` in all (-1: every one), fails with `error`, after `take` of its chain. */
struct fault {
	int nth, times, error, take;
};

static struct fault faults[CALL_COUNT][MOST_FAULTS];
static int fault_counts[CALL_COUNT];
static uint64_t call_counts[CALL_COUNT];

static int scripted(enum call call, int *take)
{
	int error = 0;

	call_counts[call]++;
	for (int i = 0; i < fault_counts[call]; i++) {
		struct fault *one = &faults[call][i];

		if (one->nth > 1) {
			one->nth--;
		} else if (one->times && !error) {
			error = one->error;
			if (take)
				*take = one->take;
			one->times -= one->times > 0;
		}
	}
	return error;
}

int fault(enum call call, const struct object *object, int *take)
{
	int error = fault_counts[call] ? scripted(call, take) : (call_counts[call]++, 0);

	if (!error && object && object->device && object->device->disassociated && calls[call].flags & COMMAND)
		error = EIO;
	return error;
}

static int number_of(const char *name)
{
	for (int call = 0; call < CALL_COUNT; call++)
		if (!strcmp(calls[call].name, name))
			return call;
	return -1;
}

/* -1: there is no such call, or too much of a script. */
int card_fail(const char *name, int nth, int times, int error, int take)
{
	int call = number_of(name), ret = -1;

	if (call < 0)
		return -1;
	pthread_mutex_lock(&card_lock);
	if (fault_counts[call] < MOST_FAULTS) {
		faults[call][fault_counts[call]++] = (struct fault){ nth, times, error, take };
		ret = 0;
	}
	pthread_mutex_unlock(&card_lock);
	return ret;
}

void card_fail_no_more(void)
{
	pthread_mutex_lock(&card_lock);
	memset(fault_counts, 0, sizeof(fault_counts));
	pthread_mutex_unlock(&card_lock);
}

/* A call that stands still until the test lets it go on, so that another thread can do something meanwhile. */
static struct {
	int nth, inside, goes;
} stalls[CALL_COUNT];

static pthread_cond_t go_on = PTHREAD_COND_INITIALIZER;

int card_stall(const char *name, int nth)
{
	int call = number_of(name);

	if (call < 0)
		return -1;
	pthread_mutex_lock(&card_lock);
	stalls[call].nth = nth;
	pthread_mutex_unlock(&card_lock);
	return 0;
}

/* How many calls stand still. */
int card_stalled(const char *name)
{
	int call = number_of(name), count;

	if (call < 0)
		return -1;
	pthread_mutex_lock(&card_lock);
	count = stalls[call].inside;
	pthread_mutex_unlock(&card_lock);
	return count;
}

int card_go_on(const char *name)
{
	int call = number_of(name);

	if (call < 0)
		return -1;
	pthread_mutex_lock(&card_lock);
	stalls[call].goes++;
	pthread_cond_broadcast(&go_on);
	pthread_mutex_unlock(&card_lock);
	return 0;
}

static void stand_still(enum call call)
{
	struct timespec until;
	int goes = stalls[call].goes, late = 0;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += MOST_SECONDS;
	stalls[call].inside++;
	while (goes == stalls[call].goes && !late)
		late = pthread_cond_timedwait(&go_on, &card_lock, &until);
	stalls[call].inside--;
	if (late)
		report("%s stood still for %d seconds, and nobody let it go on", calls[call].name, MOST_SECONDS);
}

/* How often a call was made; -1: there is no such call. */
int64_t card_count(const char *name)
{
	int call = number_of(name);
	int64_t count;

	if (call < 0)
		return -1;
	pthread_mutex_lock(&card_lock);
	count = (int64_t)call_counts[call];
	pthread_mutex_unlock(&card_lock);
	return count;
}

const char *card_call_name(int call)
{
	return call >= 0 && call < CALL_COUNT ? calls[call].name : NULL;
}

/* --- what was done wrong --- */

static char reports[REPORT_BYTES];
static size_t report_length;

void report(const char *format, ...)
{
	size_t room = sizeof(reports) - report_length;
	va_list arguments;
	int length;

	va_start(arguments, format);
	length = vsnprintf(reports + report_length, room, format, arguments);
	va_end(arguments);
	if (length < 0 || (size_t)length + 2 > room)
		return;
	report_length += (size_t)length;
	reports[report_length++] = '\n';
	reports[report_length] = 0;
}

/* Copies the lines; how many bytes there are. */
int card_reports(char *out, int size)
{
	int length;

	pthread_mutex_lock(&card_lock);
	length = (int)report_length;
	snprintf(out, (size_t)size, "%s", reports);
	pthread_mutex_unlock(&card_lock);
	return length;
}

/* --- objects --- */

struct object *first_object;
static struct object *dead[KIND_COUNT][KEPT_DEAD];
static unsigned deaths[KIND_COUNT];
static unsigned last_serial;

struct object *object_of(enum kind kind, const void *object)
{
	const void *start = object;

	if (kind == KIND_CONTEXT)
		start = container_of((struct ibv_context *)(uintptr_t)object, struct context, verbs.context);
	return (struct object *)(uintptr_t)start - 1;
}

static void *public_part(struct object *object)
{
	void *start = object + 1;

	return object->kind == KIND_CONTEXT ? (void *)&((struct context *)start)->verbs.context : start;
}

void *make(enum kind kind, size_t size, struct device *device)
{
	struct object *object = calloc(1, sizeof(*object) + size);

	if (!object)
		abort();
	*object = (struct object){ .magic = ALIVE, .kind = kind, .size = size, .device = device,
				   .serial = ++last_serial, .next = first_object, .back = &first_object };
	if (first_object)
		first_object->back = &object->next;
	first_object = object;
	return object + 1;
}

void end(enum kind kind, void *target)
{
	struct object *object = object_of(kind, target);
	struct object **place = &dead[kind][deaths[kind]++ % KEPT_DEAD];

	*object->back = object->next;
	if (object->next)
		object->next->back = object->back;
	object->magic = DEAD;
	ASAN_POISON_MEMORY_REGION(object + 1, object->size);
	if (*place) {
		ASAN_UNPOISON_MEMORY_REGION(*place + 1, (*place)->size);
		free(*place);
	}
	*place = object;
}

int is_alive(enum call call, enum kind kind, const void *target)
{
	const struct object *object = target ? object_of(kind, target) : NULL;

	if (object && object->magic == ALIVE && object->kind == kind)
		return 1;
	if (object && object->magic == DEAD && object->kind == kind)
		report("%s: %s %u was destroyed before", calls[call].name, kind_names[kind], object->serial);
	else
		report("%s: what was given is no %s", calls[call].name, kind_names[kind]);
	return 0;
}

int hold(enum call call, enum kind kind, const void *target)
{
	pthread_mutex_lock(&card_lock);
	if (stalls[call].nth && !--stalls[call].nth)
		stand_still(call);
	return kind == KIND_COUNT || is_alive(call, kind, target) ? 0 : EINVAL;
}

int enter(enum call call, enum kind kind, const void *target)
{
	int error = hold(call, kind, target);
	struct object *object = kind == KIND_COUNT || error ? NULL : object_of(kind, target);

	if (!error)
		error = fault(call, object, NULL);
	if (object && calls[call].flags & DESTROY) {
		object->refused |= !!error;
		if (!error && object->uses)
			error = EBUSY;
	}
	return error;
}

void leave(void)
{
	pthread_mutex_unlock(&card_lock);
}

void settle_events(enum call call, enum kind kind, const void *target)
{
	struct object *object = object_of(kind, target);

	if (object->unacked)
		report("%s: %s %u has %d events that were not acked, and would wait for ever", calls[call].name,
		       kind_names[kind], object->serial, object->unacked);
}

static int is_kept(const struct context *context)
{
	return context->is_cm && !context->is_dead;
}

/* A line for each object that lives: its kind, its number, "refused" if it could not be destroyed. */
int card_leftovers(char *out, int size)
{
	int length = 0;

	pthread_mutex_lock(&card_lock);
	for (struct object *object = first_object; object; object = object->next) {
		int room = length < size ? size - length : 0;

		if (object->kind == KIND_CONTEXT && is_kept((struct context *)(object + 1)))
			continue;
		length += snprintf(room ? out + length : NULL, (size_t)room, "%s|%u|%d\n", kind_names[object->kind],
				   object->serial, object->refused);
		for (struct membership *one = object->kind == KIND_ID ? ((struct id *)(object + 1))->memberships : NULL;
		     one; one = one->next) {
			room = length < size ? size - length : 0;
			length += snprintf(room ? out + length : NULL, (size_t)room, "membership|%u|%d\n",
					   object->serial, one->is_left);
		}
	}
	pthread_mutex_unlock(&card_lock);
	return length;
}

/* --- descriptors that are readable while something waits --- */

int open_bell(struct bell *bell, int breakable)
{
	int ends[2];

	if (!breakable) {
		bell->fd = bell->peer = eventfd(0, EFD_CLOEXEC);
		return bell->fd < 0 ? errno : 0;
	}
	if (socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends))
		return errno;
	bell->fd = ends[0];
	bell->peer = ends[1];
	return 0;
}

void close_bell(struct bell *bell)
{
	close(bell->fd);
	if (bell->peer != bell->fd)
		close(bell->peer);
}

void ring(struct bell *bell, int wanted)
{
	uint64_t one = 1;

	if (wanted && !bell->rung)
		(void)!write(bell->peer, &one, sizeof(one));
	if (!wanted && bell->rung)
		(void)!read(bell->fd, &one, sizeof(one));
	bell->rung = wanted;
}

/* From now on poll(2) gives POLLERR for it, as for a channel whose device is gone: a datagram that the other end
 * has not read is lost when that end disconnects, and this end is told by an error. */
void break_bell(struct bell *bell)
{
	struct sockaddr nobody = { .sa_family = AF_UNSPEC };

	if (bell->peer == bell->fd)
		return;
	ring(bell, 0);
	(void)!write(bell->fd, "", 1);
	(void)!connect(bell->peer, &nobody, sizeof(nobody));
	bell->rung = -1;
}

int await_bell(struct bell *bell)
{
	struct pollfd fd = { .fd = bell->fd, .events = POLLIN };

	while (!bell->rung) {
		if (fcntl(bell->fd, F_GETFL) & O_NONBLOCK) {
			errno = EAGAIN;
			return -1;
		}
		pthread_mutex_unlock(&card_lock);
		if (poll(&fd, 1, -1) < 0) {
			pthread_mutex_lock(&card_lock);
			return -1;
		}
		pthread_mutex_lock(&card_lock);
	}
	if (bell->rung > 0)
		return 0;
	errno = EIO;
	return -1;
}

int open_queue(struct queue *queue, int breakable)
{
	queue->last = &queue->first;
	return open_bell(&queue->bell, breakable);
}

void forget(struct queue *queue, const void *about)
{
	struct node **at = &queue->first;

	while (*at) {
		struct node *node = *at;

		if (about && node->about != about) {
			at = &node->next;
			continue;
		}
		*at = node->next;
		free(node);
	}
	queue->last = at;
	if (queue->bell.rung > 0)
		ring(&queue->bell, queue->first != NULL);
}

void close_queue(struct queue *queue)
{
	forget(queue, NULL);
	close_bell(&queue->bell);
}

void put(struct queue *queue, struct node node)
{
	struct node *kept = malloc(sizeof(*kept));

	if (!kept)
		abort();
	if (queue->bell.rung < 0) {
		free(kept);
		return;
	}
	node.next = NULL;
	*kept = node;
	*queue->last = kept;
	queue->last = &kept->next;
	ring(&queue->bell, 1);
}

int take(struct queue *queue, struct node *out)
{
	struct node *node;

	if (await_bell(&queue->bell))
		return -1;
	node = queue->first;
	*out = *node;
	queue->first = node->next;
	if (!queue->first)
		queue->last = &queue->first;
	free(node);
	ring(&queue->bell, queue->first != NULL);
	return 0;
}

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
					 .receives = (uint32_t)(qp->posted - qp->taken), .dropped = qp->dropped };
		for (int stage = 0; stage < STAGES; stage++)
			one->kept[stage] = (uint32_t)count_work(qp, (enum stage)stage);
		for (const struct attachment *at = qp->attachments; at; at = at->next)
			one->attachments++;
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
	for (int i = 0; i < MOST_DEVICES && number < 0; i++) {
		struct device *device = &devices[i];

		if (device->used || wanted->ports > MOST_PORTS)
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
				      .max_mcast_grp = 8192, .max_mcast_qp_attach = 56, .max_inline = 256,
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
	while (first_object) {
		if (first_object->kind == KIND_CONTEXT)
			close_queue(&((struct context *)(first_object + 1))->async);
		end(first_object->kind, public_part(first_object));
	}
	all_qps = NULL;
	forget_regions();
	forget_answers();
	forget_armed();
	memset(devices, 0, sizeof(devices));
	memset(delays, 0, sizeof(delays));
	memset(fault_counts, 0, sizeof(fault_counts));
	memset(call_counts, 0, sizeof(call_counts));
	for (int call = 0; call < CALL_COUNT; call++)
		stalls[call].nth = 0;
	report_length = 0;
	reports[0] = 0;
	pthread_mutex_unlock(&card_lock);
	if (with_usual_device)
		add_usual_device();
}
