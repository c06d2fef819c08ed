/* librdmacm and libibverbs, loaded at run time: nothing of them is linked. */
#ifndef MCAST_DYNLOAD_H
#define MCAST_DYNLOAD_H

#include "native.h"

/* Headers turn these two names into inline functions that call the linked symbol. */
#undef ibv_reg_mr
#undef ibv_query_port

#define MCAST_RDMACM_SYMBOLS(REQUIRED, OPTIONAL)            \
	REQUIRED(rdma_create_event_channel, "RDMACM_1.0")   \
	REQUIRED(rdma_destroy_event_channel, "RDMACM_1.0")  \
	REQUIRED(rdma_create_id, "RDMACM_1.0")              \
	REQUIRED(rdma_destroy_id, "RDMACM_1.0")             \
	REQUIRED(rdma_bind_addr, "RDMACM_1.0")              \
	REQUIRED(rdma_resolve_addr, "RDMACM_1.0")           \
	REQUIRED(rdma_create_qp_ex, "RDMACM_1.0")           \
	REQUIRED(rdma_init_qp_attr, "RDMACM_1.2")           \
	REQUIRED(rdma_join_multicast, "RDMACM_1.0")         \
	OPTIONAL(rdma_join_multicast_ex, "RDMACM_1.1")      \
	REQUIRED(rdma_leave_multicast, "RDMACM_1.0")        \
	REQUIRED(rdma_get_cm_event, "RDMACM_1.0")           \
	REQUIRED(rdma_ack_cm_event, "RDMACM_1.0")           \
	REQUIRED(rdma_get_devices, "RDMACM_1.0")            \
	REQUIRED(rdma_free_devices, "RDMACM_1.0")

#define MCAST_IBVERBS_SYMBOLS(REQUIRED, OPTIONAL)           \
	REQUIRED(ibv_get_device_list, "IBVERBS_1.1")        \
	REQUIRED(ibv_free_device_list, "IBVERBS_1.1")       \
	REQUIRED(ibv_get_device_name, "IBVERBS_1.1")        \
	REQUIRED(ibv_open_device, "IBVERBS_1.1")            \
	REQUIRED(ibv_close_device, "IBVERBS_1.1")           \
	REQUIRED(ibv_query_device, "IBVERBS_1.1")           \
	REQUIRED(ibv_query_port, "IBVERBS_1.1")             \
	REQUIRED(ibv_query_gid, "IBVERBS_1.1")              \
	OPTIONAL(_ibv_query_gid_table, "IBVERBS_1.11")      \
	REQUIRED(ibv_alloc_pd, "IBVERBS_1.1")               \
	REQUIRED(ibv_dealloc_pd, "IBVERBS_1.1")             \
	REQUIRED(ibv_reg_mr, "IBVERBS_1.1")                 \
	OPTIONAL(ibv_reg_mr_iova2, "IBVERBS_1.8")           \
	OPTIONAL(ibv_reg_dmabuf_mr, "IBVERBS_1.12")         \
	REQUIRED(ibv_dereg_mr, "IBVERBS_1.1")               \
	REQUIRED(ibv_create_comp_channel, "IBVERBS_1.0")    \
	REQUIRED(ibv_destroy_comp_channel, "IBVERBS_1.0")   \
	REQUIRED(ibv_create_cq, "IBVERBS_1.1")              \
	REQUIRED(ibv_destroy_cq, "IBVERBS_1.1")             \
	REQUIRED(ibv_get_async_event, "IBVERBS_1.1")        \
	REQUIRED(ibv_ack_async_event, "IBVERBS_1.1")        \
	REQUIRED(ibv_fork_init, "IBVERBS_1.1")              \
	REQUIRED(ibv_get_cq_event, "IBVERBS_1.1")           \
	REQUIRED(ibv_ack_cq_events, "IBVERBS_1.1")          \
	REQUIRED(ibv_query_qp, "IBVERBS_1.1")               \
	REQUIRED(ibv_modify_qp, "IBVERBS_1.1")              \
	REQUIRED(ibv_destroy_qp, "IBVERBS_1.1")             \
	REQUIRED(ibv_attach_mcast, "IBVERBS_1.1")           \
	REQUIRED(ibv_detach_mcast, "IBVERBS_1.1")           \
	REQUIRED(ibv_create_ah, "IBVERBS_1.1")              \
	REQUIRED(ibv_destroy_ah, "IBVERBS_1.1")

#define MCAST_FIELD(name, version) __typeof__(name) *name;
struct mcast_symbols {
	MCAST_RDMACM_SYMBOLS(MCAST_FIELD, MCAST_FIELD)
	MCAST_IBVERBS_SYMBOLS(MCAST_FIELD, MCAST_FIELD)
};
#undef MCAST_FIELD

/* Valid after mcast_load has returned 0; an optional symbol may be NULL. */
extern struct mcast_symbols mcast_sym;

#endif
