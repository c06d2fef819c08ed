/* What the card promises, asked in C by the headers of rdma-core. Linked with the card; `exercise NAME` runs one. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include "card.h"

enum { DEPTH = 16, SIZE = 256, MULTICAST_QP = 0xffffff, UDP_QKEY = 0x01234567 };

static void check_at(int line, int holds, const char *what)
{
	if (holds)
		return;
	fprintf(stderr, "line %d: %s (errno %d: %s)\n", line, what, errno, strerror(errno));
	exit(1);
}

#define CHECK(...) check_at(__LINE__, !!(__VA_ARGS__), #__VA_ARGS__)

/* The one report is this; then there is none. */
static void reported(const char *text)
{
	char found[4096];

	card_reports(found, sizeof(found));
	if (!strstr(found, text) || strchr(found, '\n') != found + strlen(found) - 1) {
		fprintf(stderr, "expected: %s\nreported: %s\n", text, found);
		exit(1);
	}
	exit(0);
}

static const uint32_t PORT = 0x0a000001, GROUP = 0xef010203; /* 10.0.0.1, 239.1.2.3 */

static struct sockaddr_in ipv4(uint32_t address)
{
	return (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = htonl(address) };
}

struct end {
	struct rdma_event_channel *events;
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct ibv_ah *ah;
	struct ibv_ah_attr to;
	uint8_t memory[2 * SIZE];
};

/* A queue pair that is a member of a group, with one receive posted: in memory[0]. It sends from memory[SIZE]. */
static void open_end(struct end *end)
{
	struct sockaddr_in address = ipv4(PORT);
	struct sockaddr_in group = ipv4(GROUP);
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_UD,
					 .cap = { DEPTH, DEPTH, 1, 1, 0 } };
	struct rdma_cm_event *event;

	memset(end, 0, sizeof(*end));
	CHECK(end->events = rdma_create_event_channel());
	CHECK(!rdma_create_id(end->events, &end->id, NULL, RDMA_PS_UDP));
	CHECK(!rdma_bind_addr(end->id, (struct sockaddr *)&address));
	CHECK(end->pd = ibv_alloc_pd(end->id->verbs));
	CHECK(end->channel = ibv_create_comp_channel(end->id->verbs));
	CHECK(end->cq = ibv_create_cq(end->id->verbs, 2 * DEPTH, end, end->channel, 0));
	CHECK(end->mr = ibv_reg_mr(end->pd, end->memory, sizeof(end->memory), IBV_ACCESS_LOCAL_WRITE));
	init.send_cq = init.recv_cq = end->cq;
	CHECK(!rdma_create_qp(end->id, end->pd, &init));
	CHECK(!rdma_join_multicast(end->id, (struct sockaddr *)&group, end));
	CHECK(!rdma_get_cm_event(end->events, &event));
	CHECK(event->event == RDMA_CM_EVENT_MULTICAST_JOIN && event->param.ud.private_data == end);
	end->to = event->param.ud.ah_attr;
	CHECK(end->ah = ibv_create_ah(end->pd, &end->to));
	CHECK(!rdma_ack_cm_event(event));
}

static void close_end(struct end *end)
{
	struct sockaddr_in group = ipv4(GROUP);

	CHECK(!rdma_leave_multicast(end->id, (struct sockaddr *)&group));
	CHECK(!ibv_destroy_ah(end->ah));
	rdma_destroy_qp(end->id);
	CHECK(!ibv_dereg_mr(end->mr));
	CHECK(!ibv_destroy_cq(end->cq));
	CHECK(!ibv_destroy_comp_channel(end->channel));
	CHECK(!ibv_dealloc_pd(end->pd));
	CHECK(!rdma_destroy_id(end->id));
	rdma_destroy_event_channel(end->events);
}

static int post_receive(struct end *end)
{
	struct ibv_sge sge = { (uintptr_t)end->memory, SIZE, end->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 7, .sg_list = &sge, .num_sge = 1 }, *bad;

	return ibv_post_recv(end->id->qp, &wr, &bad);
}

static int post_send_to(struct end *end, uint64_t wr_id, uint32_t qp_num)
{
	struct ibv_sge sge = { (uintptr_t)end->memory + SIZE, 4, end->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED,
				  .wr.ud = { end->ah, qp_num, UDP_QKEY } }, *bad;

	return ibv_post_send(end->id->qp, &wr, &bad);
}

static int post_send(struct end *end, uint64_t wr_id)
{
	return post_send_to(end, wr_id, MULTICAST_QP);
}

static int readable(int fd)
{
	struct pollfd one = { .fd = fd, .events = POLLIN };

	CHECK(poll(&one, 1, 0) >= 0);
	return one.revents;
}

/* --- what goes well --- */

static void nothing_is_left(void)
{
	char text[64];
	struct end end;

	open_end(&end);
	close_end(&end);
	CHECK(!card_leftovers(text, sizeof(text)));
	CHECK(!card_reports(text, sizeof(text)));
}

static void a_message_comes_back(void)
{
	struct end end;
	struct ibv_wc wc[3];
	struct ibv_cq *cq;
	void *user;

	open_end(&end);
	memcpy(end.memory + SIZE, "mine", 4);
	CHECK(!post_receive(&end));
	CHECK(!ibv_req_notify_cq(end.cq, 0));
	CHECK(!readable(end.channel->fd));
	CHECK(!post_send(&end, 1));
	CHECK(readable(end.channel->fd) == POLLIN);
	CHECK(!ibv_get_cq_event(end.channel, &cq, &user) && cq == end.cq && user == &end);
	ibv_ack_cq_events(cq, 1);
	CHECK(!readable(end.channel->fd));
	CHECK(ibv_poll_cq(end.cq, 3, wc) == 2);
	CHECK(wc[0].opcode == IBV_WC_RECV && wc[0].wr_id == 7 && wc[0].byte_len == GRH_BYTES + 4);
	CHECK(wc[0].wc_flags & IBV_WC_GRH && wc[0].src_qp == end.id->qp->qp_num);
	CHECK(wc[1].opcode == IBV_WC_SEND && wc[1].wr_id == 1 && wc[1].status == IBV_WC_SUCCESS);
	CHECK(!memcmp(end.memory + GRH_BYTES, "mine", 4) && end.memory[20] == 0x45);
	close_end(&end);
}

static void the_payload_is_read_when_it_is_sent(void)
{
	struct end end;
	struct ibv_wc wc[2];

	open_end(&end);
	card_delay(0, STAGE_WIRE, -1);
	CHECK(!post_receive(&end) && !post_send(&end, 1));
	memcpy(end.memory + SIZE, "late", 4);
	CHECK(ibv_poll_cq(end.cq, 2, wc) == 0);
	CHECK(card_release(end.id->qp->qp_num, STAGE_WIRE, -1) == 1);
	CHECK(ibv_poll_cq(end.cq, 2, wc) == 2);
	CHECK(!memcmp(end.memory + GRH_BYTES, "late", 4));
	close_end(&end);
}

static void completions_come_in_the_order_of_their_release(void)
{
	static const uint64_t order[] = { 2, 0, 1 };
	struct end end;
	struct ibv_wc wc;
	uint32_t qp_num;

	open_end(&end);
	qp_num = end.id->qp->qp_num;
	CHECK(!card_delay(qp_num, STAGE_SEND, -1));
	for (uint64_t i = 0; i < 3; i++)
		CHECK(!post_send(&end, i));
	CHECK(card_release(qp_num, STAGE_SEND, 2) == 3);
	CHECK(card_release(qp_num, STAGE_SEND, 0) == 2);
	CHECK(card_release(qp_num, STAGE_SEND, -1) == 1);
	for (uint64_t i = 0; i < 3; i++)
		CHECK(ibv_poll_cq(end.cq, 1, &wc) == 1 && wc.wr_id == order[i]);
	close_end(&end);
}

static void who_sleeps_is_woken_in_time(void)
{
	struct end end;
	struct pollfd fd;
	struct ibv_wc wc;

	open_end(&end);
	card_delay(0, STAGE_SEND, 2000000);
	fd = (struct pollfd){ .fd = end.channel->fd, .events = POLLIN };
	CHECK(!ibv_req_notify_cq(end.cq, 0));
	CHECK(!post_send(&end, 1));
	CHECK(poll(&fd, 1, 20000) == 1);
	CHECK(ibv_poll_cq(end.cq, 1, &wc) == 1);
	close_end(&end);
}

static void a_moderated_queue_tells_of_several_or_in_time(void)
{
	struct ibv_modify_cq_attr moderate = { IBV_CQ_ATTR_MODERATE, { 2, 0 } };
	struct pollfd fd;
	struct ibv_cq *cq;
	struct ibv_wc wc[2];
	struct end end;
	void *user;

	open_end(&end);
	fd = (struct pollfd){ .fd = end.channel->fd, .events = POLLIN };
	CHECK(!ibv_modify_cq(end.cq, &moderate));
	CHECK(!ibv_req_notify_cq(end.cq, 0));
	CHECK(!post_send(&end, 1) && !readable(end.channel->fd)); /* without a period it would wait for ever */
	CHECK(!post_send(&end, 2) && readable(end.channel->fd));
	CHECK(!ibv_get_cq_event(end.channel, &cq, &user) && cq == end.cq && ibv_poll_cq(cq, 2, wc) == 2);
	moderate.moderate.cq_period = 100;
	CHECK(!ibv_modify_cq(end.cq, &moderate) && !ibv_req_notify_cq(end.cq, 0));
	CHECK(!post_send(&end, 3) && poll(&fd, 1, 20000) == 1);
	CHECK(!ibv_get_cq_event(end.channel, &cq, &user) && ibv_poll_cq(cq, 2, wc) == 1);
	ibv_ack_cq_events(cq, 2);
	close_end(&end);
}

static void asynchronous_events_are_read(void)
{
	static const enum ibv_event_type of_ports[] = { IBV_EVENT_PORT_ERR, IBV_EVENT_PORT_ACTIVE,
							IBV_EVENT_GID_CHANGE, IBV_EVENT_LID_CHANGE,
							IBV_EVENT_SM_CHANGE, IBV_EVENT_CLIENT_REREGISTER };
	struct ibv_async_event event;
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	struct end end;
	struct ibv_wc wc;

	open_end(&end);
	CHECK(!post_receive(&end));
	CHECK(!readable(end.id->verbs->async_fd));
	CHECK(!card_qp_event(end.id->qp->qp_num, 0, IBV_EVENT_QP_FATAL));
	for (size_t i = 0; i < sizeof(of_ports) / sizeof(*of_ports); i++)
		card_port_event(0, 1, of_ports[i]);
	CHECK(readable(end.id->verbs->async_fd) == POLLIN);
	CHECK(!ibv_get_async_event(end.id->verbs, &event));
	CHECK(event.event_type == IBV_EVENT_QP_FATAL && event.element.qp == end.id->qp);
	ibv_ack_async_event(&event);
	for (size_t i = 0; i < sizeof(of_ports) / sizeof(*of_ports); i++) {
		CHECK(!ibv_get_async_event(end.id->verbs, &event));
		CHECK(event.event_type == of_ports[i] && event.element.port_num == 1);
		ibv_ack_async_event(&event);
	}
	CHECK(!fcntl(end.id->verbs->async_fd, F_SETFL, O_NONBLOCK));
	CHECK(ibv_get_async_event(end.id->verbs, &event) == -1 && errno == EAGAIN);
	CHECK(!ibv_query_qp(end.id->qp, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_ERR);
	CHECK(ibv_poll_cq(end.cq, 1, &wc) == 1 && wc.status == IBV_WC_WR_FLUSH_ERR);
	close_end(&end);
}

static void a_removed_device_gives_pollerr(void)
{
	struct rdma_cm_event *event;
	struct ibv_cq *cq;
	struct end end;
	void *user;

	open_end(&end);
	card_remove(0, 1);
	CHECK(readable(end.channel->fd) == POLLERR);
	CHECK(ibv_get_cq_event(end.channel, &cq, &user) == -1 && errno == EIO);
	CHECK(!rdma_get_cm_event(end.events, &event) && event->event == RDMA_CM_EVENT_DEVICE_REMOVAL);
	CHECK(!rdma_ack_cm_event(event));
	CHECK(!ibv_alloc_pd(end.id->verbs) && errno == EIO);
	CHECK(ibv_dereg_mr(end.mr) == EIO);
	CHECK(!ibv_get_device_list(NULL)[0]);
}

static void a_post_takes_a_part_of_its_chain(void)
{
	struct end end;
	struct ibv_sge sge;
	struct ibv_send_wr wrs[3], *bad = NULL;
	struct ibv_wc wc[3];

	open_end(&end);
	sge = (struct ibv_sge){ (uintptr_t)end.memory, 1, end.mr->lkey };
	for (int i = 0; i < 3; i++)
		wrs[i] = (struct ibv_send_wr){ .next = i < 2 ? &wrs[i + 1] : NULL, .sg_list = &sge, .num_sge = 1,
					       .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED,
					       .wr.ud = { end.ah, MULTICAST_QP, UDP_QKEY } };
	card_fail("ibv_post_send", 2, 1, ENOMEM, 2);
	CHECK(!ibv_post_send(end.id->qp, wrs, &bad));
	CHECK(ibv_poll_cq(end.cq, 3, wc) == 3);
	CHECK(ibv_post_send(end.id->qp, wrs, &bad) == ENOMEM && bad == &wrs[2]);
	CHECK(ibv_poll_cq(end.cq, 3, wc) == 2);
	CHECK(!ibv_post_send(end.id->qp, wrs, &bad));
	CHECK(ibv_poll_cq(end.cq, 3, wc) == 3);
	close_end(&end);
}

static void queues_are_as_deep_as_they_are(void)
{
	struct end end;
	struct ibv_wc wc;

	open_end(&end);
	for (int i = 0; i < DEPTH; i++)
		CHECK(!post_send(&end, 0) && !post_receive(&end));
	CHECK(post_send(&end, 0) == ENOMEM && post_receive(&end) == ENOMEM);
	CHECK(ibv_poll_cq(end.cq, 1, &wc) == 1); /* of the first send: its message came to nobody */
	CHECK(wc.opcode == IBV_WC_SEND && !post_send(&end, 0));
	close_end(&end);
}

static void extended_queues_have_time_stamps(void)
{
	struct ibv_cq_init_attr_ex init = { .cqe = DEPTH, .wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |
							    IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK };
	struct ibv_qp_init_attr qp_init = { .qp_type = IBV_QPT_UD, .cap = { DEPTH, DEPTH, 1, 1, 0 } };
	struct ibv_modify_cq_attr moderate = { IBV_CQ_ATTR_MODERATE, { 8, 100 } };
	struct ibv_values_ex now = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };
	struct ibv_poll_cq_attr poll_attr = { 0 };
	struct ibv_device_attr_ex attr;
	struct ibv_cq_ex *cq;
	struct end end;

	open_end(&end);
	CHECK(!ibv_query_device_ex(end.id->verbs, NULL, &attr) && attr.hca_core_clock == 1000000);
	CHECK(!ibv_query_rt_values_ex(end.id->verbs, &now) && now.raw_clock.tv_nsec >= 0);
	CHECK(cq = ibv_create_cq_ex(end.id->verbs, &init));
	CHECK(!ibv_modify_cq(ibv_cq_ex_to_cq(cq), &moderate));
	rdma_destroy_qp(end.id);
	qp_init.send_cq = qp_init.recv_cq = ibv_cq_ex_to_cq(cq);
	CHECK(!rdma_create_qp(end.id, end.pd, &qp_init));
	CHECK(!post_send(&end, 5) && !post_send(&end, 6));
	CHECK(!ibv_start_poll(cq, &poll_attr) && cq->wr_id == 5 && cq->status == IBV_WC_SUCCESS);
	CHECK(ibv_wc_read_opcode(cq) == IBV_WC_SEND && ibv_wc_read_completion_ts(cq));
	CHECK(ibv_wc_read_completion_wallclock_ns(cq) > 1000000000);
	CHECK(!ibv_next_poll(cq) && cq->wr_id == 6 && ibv_next_poll(cq) == ENOENT);
	ibv_end_poll(cq);
	CHECK(ibv_start_poll(cq, &poll_attr) == ENOENT);
}

static void memory_of_a_dma_buf(void)
{
	struct end end;
	struct ibv_mr *mr;
	struct ibv_sge sge;
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	struct ibv_wc wc[2];
	uint8_t found[4];
	int fd = memfd_create("dma-buf", 0);

	open_end(&end);
	CHECK(!ftruncate(fd, 8192));
	CHECK(!ibv_reg_dmabuf_mr(end.pd, 100, 4096, 0x10000, fd, IBV_ACCESS_LOCAL_WRITE) && errno == EINVAL);
	CHECK(mr = ibv_reg_dmabuf_mr(end.pd, 100, 4096, 0x10000 + 100, fd, IBV_ACCESS_LOCAL_WRITE));
	sge = (struct ibv_sge){ 0x10000 + 100, 100, mr->lkey };
	memcpy(end.memory + SIZE, "deep", 4);
	CHECK(!ibv_post_recv(end.id->qp, &wr, &bad) && !post_send(&end, 1));
	CHECK(ibv_poll_cq(end.cq, 2, wc) == 2 && wc[0].status == IBV_WC_SUCCESS);
	CHECK(pread(fd, found, 4, 100 + GRH_BYTES) == 4 && !memcmp(found, "deep", 4));
	CHECK(!ibv_dereg_mr(mr));
	CHECK(mr = ibv_reg_mr_iova2(end.pd, end.memory, SIZE, 0, IBV_ACCESS_RELAXED_ORDERING));
	CHECK(!ibv_dereg_mr(mr));
	CHECK(!ibv_fork_init() && ibv_is_fork_initialized() == IBV_FORK_ENABLED);
	close_end(&end);
}

static void infiniband_says_where_from(void)
{
	static const struct card_device device = { .name = "ib0", .ports = 1, .max_qp_wr = DEPTH, .max_send_sge = 1,
						   .comp_vectors = 1 };
	static const struct card_port port = { .link_layer = IBV_LINK_LAYER_INFINIBAND, .state = IBV_PORT_ACTIVE,
					       .active_mtu = IBV_MTU_2048, .max_mtu = IBV_MTU_4096,
					       .group_mtu = IBV_MTU_2048, .lid = 8, .lmc = 2, .group_sl = 5,
					       .group_rate = IBV_RATE_10_GBPS, .group_qkey = UDP_QKEY,
					       .pkeys = { 0xffff }, .gids[0] = { 0xfe, 0x80, [15] = 8 },
					       .addresses[0] = { [10] = 0xff, 0xff, 10, 0, 0, 1 } };
	struct end end;
	struct ibv_wc wc[2];

	card_reset(0);
	card_add_device(&device, &port);
	open_end(&end);
	CHECK(end.to.static_rate == IBV_RATE_10_GBPS && end.to.sl == 5 && end.to.dlid >= 0xc000);
	end.to.src_path_bits = 1;
	CHECK(!ibv_destroy_ah(end.ah) && (end.ah = ibv_create_ah(end.pd, &end.to)));
	CHECK(!post_receive(&end) && !post_send(&end, 1));
	CHECK(ibv_poll_cq(end.cq, 2, wc) == 2);
	CHECK(wc[0].slid == 9 && wc[0].sl == 5 && wc[0].wc_flags == IBV_WC_GRH && end.memory[0] >> 4 == 6);
	end.to = (struct ibv_ah_attr){ .dlid = 10, .sl = 3, .port_num = 1 }; /* without a GRH, to path bits 2 */
	CHECK(!ibv_destroy_ah(end.ah) && (end.ah = ibv_create_ah(end.pd, &end.to)));
	CHECK(!post_receive(&end) && !post_send_to(&end, 1, end.id->qp->qp_num));
	CHECK(ibv_poll_cq(end.cq, 2, wc) == 2);
	CHECK(wc[0].slid == 8 && wc[0].sl == 3 && wc[0].dlid_path_bits == 2 && !wc[0].wc_flags);
	close_end(&end);
}

static void *send_many(void *argument)
{
	for (int i = 0; i < 2000; i++)
		post_send(argument, 0);
	return NULL;
}

static void *poll_many(void *argument)
{
	struct ibv_wc wc[4];

	for (int i = 0; i < 5000; i++) {
		ibv_poll_cq(((struct end *)argument)->cq, 4, wc);
		ibv_req_notify_cq(((struct end *)argument)->cq, 0);
	}
	return NULL;
}

static void threads_share_a_card(void)
{
	pthread_t threads[4];
	struct end end;

	open_end(&end);
	card_delay(0, STAGE_SEND, 1000);
	for (int i = 0; i < 4; i++)
		CHECK(!pthread_create(&threads[i], NULL, i % 2 ? send_many : poll_many, &end));
	for (int i = 0; i < 4; i++)
		CHECK(!pthread_join(threads[i], NULL));
}

/* --- what is reported --- */

static void use_after_destroy(void)
{
	struct end end;

	open_end(&end);
	close_end(&end);
	CHECK(ibv_destroy_cq(end.cq) == EINVAL);
	reported("ibv_destroy_cq: completion queue");
}

static void destroy_twice(void)
{
	struct end end;

	open_end(&end);
	CHECK(!ibv_destroy_ah(end.ah) && ibv_destroy_ah(end.ah) == EINVAL);
	reported("ibv_destroy_ah: address handle");
}

/* The event of a new id whose address was resolved. */
static struct rdma_cm_event *resolve(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct sockaddr_in address = ipv4(PORT);
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_UDP));
	CHECK(!rdma_resolve_addr(id, (struct sockaddr *)&address, (struct sockaddr *)&address, 1000));
	CHECK(!rdma_get_cm_event(channel, &event) && event->event == RDMA_CM_EVENT_ADDR_RESOLVED);
	return event;
}

static void an_event_is_not_acked(void)
{
	CHECK(!rdma_destroy_id(resolve()->id));
	reported("rdma_destroy_id: id");
}

static void an_event_is_acked_twice(void)
{
	struct rdma_cm_event *event = resolve();

	CHECK(!rdma_ack_cm_event(event) && rdma_ack_cm_event(event) == -1);
	reported("rdma_ack_cm_event: event");
}

static void an_asynchronous_event_is_not_acked(void)
{
	struct ibv_async_event event;
	struct end end;

	open_end(&end);
	CHECK(!card_qp_event(end.id->qp->qp_num, 1, IBV_EVENT_CQ_ERR));
	CHECK(!ibv_get_async_event(end.id->verbs, &event));
	CHECK(event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == end.cq);
	close_end(&end);
	reported("ibv_destroy_cq: completion queue");
}

static void a_completion_event_is_not_acked(void)
{
	struct ibv_cq *cq;
	struct end end;
	void *user;

	open_end(&end);
	ibv_req_notify_cq(end.cq, 0);
	post_send(&end, 1);
	CHECK(!ibv_get_cq_event(end.channel, &cq, &user));
	close_end(&end);
	reported("ibv_destroy_cq: completion queue");
}

static void a_region_is_deregistered_too_early(void)
{
	struct end end;
	struct ibv_wc wc;

	open_end(&end);
	card_delay(0, STAGE_WIRE, -1);
	CHECK(!post_send(&end, 1) && !ibv_dereg_mr(end.mr));
	card_release(end.id->qp->qp_num, STAGE_WIRE, -1);
	CHECK(ibv_poll_cq(end.cq, 1, &wc) == 1 && wc.status == IBV_WC_LOC_PROT_ERR);
	reported("no memory region has the key");
}

static void an_address_is_destroyed_too_early(void)
{
	struct end end;

	open_end(&end);
	card_delay(0, STAGE_WIRE, -1);
	CHECK(!post_send(&end, 1) && !ibv_destroy_ah(end.ah));
	card_release(end.id->qp->qp_num, STAGE_WIRE, -1);
	reported("ibv_destroy_ah: sends with address handle");
}

static void completions_overflow(void)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_UD, .cap = { DEPTH, DEPTH, 1, 1, 0 } };
	struct end end;

	open_end(&end);
	rdma_destroy_qp(end.id);
	CHECK(init.send_cq = init.recv_cq = ibv_create_cq(end.id->verbs, 1, NULL, NULL, 0));
	CHECK(!rdma_create_qp(end.id, end.pd, &init));
	CHECK(!post_send(&end, 1) && !post_send(&end, 2));
	reported("overflowed");
}

static const struct {
	const char *name;
	void (*run)(void);
} all[] = {
#define ONE(name) { #name, name }
	ONE(nothing_is_left), ONE(a_message_comes_back), ONE(the_payload_is_read_when_it_is_sent),
	ONE(completions_come_in_the_order_of_their_release), ONE(who_sleeps_is_woken_in_time),
	ONE(a_moderated_queue_tells_of_several_or_in_time), ONE(asynchronous_events_are_read),
	ONE(a_removed_device_gives_pollerr), ONE(a_post_takes_a_part_of_its_chain),
	ONE(queues_are_as_deep_as_they_are), ONE(extended_queues_have_time_stamps), ONE(memory_of_a_dma_buf),
	ONE(infiniband_says_where_from), ONE(threads_share_a_card), ONE(use_after_destroy), ONE(destroy_twice), ONE(an_event_is_not_acked),
	ONE(an_event_is_acked_twice), ONE(an_asynchronous_event_is_not_acked), ONE(a_completion_event_is_not_acked), ONE(a_region_is_deregistered_too_early),
	ONE(an_address_is_destroyed_too_early), ONE(completions_overflow),
};

int main(int argc, char **argv)
{
	static const struct card_device device = { .name = "card0", .guid = 1, .ports = 1, .max_qp_wr = DEPTH,
						   .max_inline = 64, .max_send_sge = 4, .comp_vectors = 1, .has_cq_ex = 1,
						   .has_modify_cq = 1, .has_relaxed_ordering = 1, .has_dmabuf = 1,
						   .clock_khz = 1000000, .clocks = CLOCK_OWN | CLOCK_OF_DAY };
	static const struct card_port port = { .link_layer = IBV_LINK_LAYER_ETHERNET, .state = IBV_PORT_ACTIVE,
					       .active_mtu = IBV_MTU_1024, .max_mtu = IBV_MTU_4096,
					       .pkeys = { 0xffff },
					       .gids[0] = { [10] = 0xff, 0xff, 10, 0, 0, 1 },
					       .addresses[0] = { [10] = 0xff, 0xff, 10, 0, 0, 1 } };
	size_t count = sizeof(all) / sizeof(*all);

	card_reset(0);
	card_add_device(&device, &port);

	for (size_t i = 0; i < count; i++) {
		if (argc < 2)
			puts(all[i].name);
		else if (!strcmp(argv[1], all[i].name))
			return all[i].run(), 0;
	}
	return argc >= 2;
}
