/* libibverbs: protection domains, memory regions, completion channels and queues. */
#include "inside.h"

#include <sys/mman.h>

enum { MAX_MRS = 4096 };

static struct mr *mrs[MAX_MRS];
static unsigned last_mr;

/* --- protection domains and memory --- */

struct ibv_pd *ibv_alloc_pd(struct ibv_context *which)
{
	int error = enter(CALL_ibv_alloc_pd, KIND_CONTEXT, which);
	struct pd *pd = NULL;

	if (!error) {
		pd = make(KIND_PD, sizeof(*pd), device_of(KIND_CONTEXT, which));
		pd->pd.context = which;
		object_of(KIND_CONTEXT, which)->uses++;
	}
	return made(pd, error);
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	int error = enter(CALL_ibv_dealloc_pd, KIND_PD, pd);

	if (!error) {
		object_of(KIND_CONTEXT, pd->context)->uses--;
		end(KIND_PD, pd);
	}
	return done(error);
}

/* An lkey has the place in the table and how often it was taken before: one that is gone is known. */
static int place_mr(struct mr *mr)
{
	for (unsigned tries = 0; tries < MAX_MRS; tries++) {
		unsigned number = ++last_mr, place = number % MAX_MRS;

		if (mrs[place])
			continue;
		mrs[place] = mr;
		mr->mr.lkey = mr->mr.rkey = number;
		return 0;
	}
	return ENOMEM;
}

struct mr *find_mr(uint32_t lkey)
{
	struct mr *mr = mrs[lkey % MAX_MRS];

	return mr && mr->mr.lkey == lkey ? mr : NULL;
}

/* Return the access that the device has to the memory of that key: enum ibv_access_flags; -1: there is none. */
int64_t card_access(uint32_t lkey)
{
	const struct mr *mr;
	int64_t access;

	pthread_mutex_lock(&card_lock);
	mr = find_mr(lkey);
	access = mr ? (int64_t)mr->access : -1;
	pthread_mutex_unlock(&card_lock);
	return access;
}

void forget_regions(void)
{
	memset(mrs, 0, sizeof(mrs));
}

static struct mr *new_mr(struct ibv_pd *pd, uint8_t *base, size_t length, uint64_t iova, unsigned int access)
{
	struct mr *mr = make(KIND_MR, sizeof(*mr), device_of(KIND_PD, pd));

	mr->mr.context = pd->context;
	mr->mr.pd = pd;
	mr->mr.addr = base;
	mr->mr.length = length;
	mr->base = base;
	mr->iova = iova;
	mr->access = access;
	object_of(KIND_PD, pd)->uses++;
	if (place_mr(mr))
		abort();
	return mr;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned int access)
{
	int error = enter(CALL_ibv_reg_mr, KIND_PD, pd);

	/* libibverbs masks what is optional and not there */
	if (!error && !device_of(KIND_PD, pd)->is.has_relaxed_ordering)
		access &= ~(unsigned int)IBV_ACCESS_OPTIONAL_RANGE;
	return made(error ? NULL : new_mr(pd, address, length, iova, access), error);
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access)
{
	return ibv_reg_mr_iova2(pd, address, length, (uintptr_t)address, (unsigned int)access);
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
	int error = enter(CALL_ibv_reg_dmabuf_mr, KIND_PD, pd);
	struct mr *mr = NULL;
	uint8_t *memory;

	if (!error && !device_of(KIND_PD, pd)->is.has_dmabuf)
		error = EOPNOTSUPP;
	if (!error && (iova ^ offset) & 0xfff)
		error = EINVAL; /* ibv_reg_mr(3): both have the same offset in a page */
	if (error)
		return made(NULL, error);
	/* the file from its start: an offset need not be that of a page */
	memory = mmap(NULL, offset + length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (memory == MAP_FAILED)
		return made(NULL, errno);
	mr = new_mr(pd, memory + offset, length, iova, (unsigned int)access);
	mr->mr.addr = NULL;
	mr->mapped = memory;
	mr->mapped_bytes = offset + length;
	return made(mr, 0);
}

int ibv_dereg_mr(struct ibv_mr *target)
{
	int error = enter(CALL_ibv_dereg_mr, KIND_MR, target);
	struct mr *mr = (struct mr *)target;

	if (!error) {
		mrs[target->lkey % MAX_MRS] = NULL;
		if (mr->mapped)
			munmap(mr->mapped, mr->mapped_bytes);
		object_of(KIND_PD, target->pd)->uses--;
		end(KIND_MR, mr);
	}
	return done(error);
}

/* --- completion channels and queues --- */

uint32_t power_of_two(uint32_t least)
{
	uint32_t found = 1;

	while (found < least)
		found *= 2;
	return found;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *which)
{
	int error = enter(CALL_ibv_create_comp_channel, KIND_CONTEXT, which);
	struct comp_channel *channel = NULL;

	if (!error) {
		struct device *device = device_of(KIND_CONTEXT, which);

		channel = make(KIND_COMP_CHANNEL, sizeof(*channel), device);
		/* a benchmark's device is never removed, and an eventfd is quicker */
		open_queue(&channel->events, !device->ports[0].any_address);
		channel->channel.context = which;
		channel->channel.fd = channel->events.bell.fd;
		object_of(KIND_CONTEXT, which)->uses++;
	}
	return made(channel, error);
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *target)
{
	int error = enter(CALL_ibv_destroy_comp_channel, KIND_COMP_CHANNEL, target);

	if (!error) {
		object_of(KIND_CONTEXT, target->context)->uses--;
		close_queue(&((struct comp_channel *)target)->events);
		end(KIND_COMP_CHANNEL, target);
	}
	return done(error);
}

static struct cq *new_cq(enum call call, struct ibv_context *which, uint32_t depth, void *user,
			 struct ibv_comp_channel *channel, uint32_t vector, int *error)
{
	struct cq *cq;

	*error = enter(call, KIND_CONTEXT, which);
	if (!*error && (!depth || vector >= device_of(KIND_CONTEXT, which)->is.comp_vectors))
		*error = EINVAL;
	if (*error)
		return NULL;
	cq = make(KIND_CQ, sizeof(*cq), device_of(KIND_CONTEXT, which));
	cq->ring = calloc(power_of_two(depth), sizeof(*cq->ring));
	cq->size = depth;
	cq->mask = power_of_two(depth) - 1;
	cq->vector = vector;
	cq->tell_at = INT64_MAX;
	cq->cq.context = which;
	cq->cq.channel = channel;
	cq->cq.cq_context = user;
	cq->cq.cqe = (int)depth;
	if (channel)
		object_of(KIND_COMP_CHANNEL, channel)->uses++;
	object_of(KIND_CONTEXT, which)->uses++;
	return cq;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *which, int depth, void *user, struct ibv_comp_channel *channel,
			     int vector)
{
	int error;
	struct cq *cq = new_cq(CALL_ibv_create_cq, which, (uint32_t)depth, user, channel, (uint32_t)vector, &error);

	return made(cq, error);
}

#define FIELD(type, name, value)                                    \
	static type read_##name(struct ibv_cq_ex *target)           \
	{                                                           \
		const struct entry *now = &((struct cq *)target)->now; \
									\
		return value;                                       \
	}

FIELD(enum ibv_wc_opcode, opcode, now->wc.opcode)
FIELD(uint32_t, vendor_err, now->wc.vendor_err)
FIELD(uint32_t, byte_len, now->wc.byte_len)
FIELD(__be32, imm_data, now->wc.imm_data)
FIELD(uint32_t, qp_num, now->wc.qp_num)
FIELD(uint32_t, src_qp, now->wc.src_qp)
FIELD(unsigned int, wc_flags, now->wc.wc_flags)
FIELD(uint32_t, slid, now->wc.slid)
FIELD(uint8_t, sl, now->wc.sl)
FIELD(uint8_t, dlid_path_bits, now->wc.dlid_path_bits)
FIELD(uint64_t, completion_wallclock_ns, now->stamp)

/* Ticks of the device's clock, which starts with the host's. */
static uint64_t read_completion_ts(struct ibv_cq_ex *target)
{
	const struct device *device = device_of(KIND_CQ, target);

	return (uint64_t)((unsigned __int128)((struct cq *)target)->now.ticks * device->is.clock_khz / 1000000);
}

static int next_poll(struct ibv_cq_ex *target)
{
	struct cq *cq = (struct cq *)target;
	int error = enter(CALL_ibv_poll_cq, KIND_CQ, target);

	if (!error && !next_entry(cq, &cq->now))
		error = ENOENT;
	if (!error) {
		target->wr_id = cq->now.wc.wr_id;
		target->status = cq->now.wc.status;
	}
	return done(error);
}

static int start_poll(struct ibv_cq_ex *target, struct ibv_poll_cq_attr *attr)
{
	int error = attr->comp_mask ? EINVAL : next_poll(target);
	struct cq *cq = (struct cq *)target;

	if (!error && cq->is_polled)
		report("ibv_start_poll: the last poll was not ended");
	cq->is_polled |= !error;
	return error;
}

static void end_poll(struct ibv_cq_ex *target)
{
	((struct cq *)target)->is_polled = 0;
}

struct ibv_cq_ex *create_cq_ex(struct ibv_context *which, struct ibv_cq_init_attr_ex *init)
{
	uint32_t clocks = (init->wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP ? CLOCK_OWN : 0) |
			  (init->wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK ? CLOCK_OF_DAY : 0);
	int error;
	struct cq *cq;

	if (clocks & ~device_of(KIND_CONTEXT, which)->is.clocks) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	cq = new_cq(CALL_ibv_create_cq_ex, which, init->cqe, init->cq_context, init->channel, init->comp_vector, &error);

	if (cq) {
		cq->cq.start_poll = start_poll;
		cq->cq.next_poll = next_poll;
		cq->cq.end_poll = end_poll;
		cq->cq.read_opcode = read_opcode;
		cq->cq.read_vendor_err = read_vendor_err;
		cq->cq.read_byte_len = read_byte_len;
		cq->cq.read_imm_data = read_imm_data;
		cq->cq.read_qp_num = read_qp_num;
		cq->cq.read_src_qp = read_src_qp;
		cq->cq.read_wc_flags = read_wc_flags;
		cq->cq.read_slid = read_slid;
		cq->cq.read_sl = read_sl;
		cq->cq.read_dlid_path_bits = read_dlid_path_bits;
		if (init->wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP)
			cq->cq.read_completion_ts = read_completion_ts;
		if (init->wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
			cq->cq.read_completion_wallclock_ns = read_completion_wallclock_ns;
	}
	return made(cq, error);
}

int modify_cq(struct ibv_cq *target, struct ibv_modify_cq_attr *attr)
{
	int error = enter(CALL_ibv_modify_cq, KIND_CQ, target);

	if (!error && attr->attr_mask == IBV_CQ_ATTR_MODERATE)
		((struct cq *)target)->moderation = attr->moderate;
	else if (!error)
		error = EINVAL;
	return done(error);
}

int ibv_destroy_cq(struct ibv_cq *target)
{
	int error = enter(CALL_ibv_destroy_cq, KIND_CQ, target);
	struct cq *cq = (struct cq *)target;

	if (error)
		return done(error);
	settle_events(CALL_ibv_destroy_cq, KIND_CQ, target);
	forget(&container_of(target->context, struct context, verbs.context)->async, cq);
	if (target->channel) {
		forget(&((struct comp_channel *)target->channel)->events, cq);
		object_of(KIND_COMP_CHANNEL, target->channel)->uses--;
	}
	object_of(KIND_CONTEXT, target->context)->uses--;
	forget_cq(cq);
	end(KIND_CQ, cq);
	return done(0);
}

int ibv_get_cq_event(struct ibv_comp_channel *target, struct ibv_cq **cq, void **user)
{
	int error = enter(CALL_ibv_get_cq_event, KIND_COMP_CHANNEL, target);
	struct node node;

	if (!error && take(&((struct comp_channel *)target)->events, &node))
		error = errno;
	if (!error) {
		*cq = node.about;
		*user = (*cq)->cq_context;
		object_of(KIND_CQ, *cq)->unacked++;
	}
	leave();
	errno = error ? error : errno;
	return error ? -1 : 0;
}

void ibv_ack_cq_events(struct ibv_cq *target, unsigned int count)
{
	if (!enter(CALL_ibv_ack_cq_events, KIND_CQ, target)) {
		struct object *object = object_of(KIND_CQ, target);

		if ((unsigned int)object->unacked < count)
			report("ibv_ack_cq_events: %u acked, %d were read", count, object->unacked);
		object->unacked -= (int)count;
	}
	leave();
}
