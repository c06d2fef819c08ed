// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* An HCA as rdmavt and the kernel's InfiniBand core see it. */
#include <linux/module.h>
#include <linux/slab.h>
#include <rdma/rdmavt_cq.h>

#include "softib.h"

#define CAPABILITIES (IB_PORT_TRAP_SUP | IB_PORT_SYS_IMAGE_GUID_SUP | IB_PORT_CLIENT_REG_SUP | \
		      IB_PORT_CAP_MASK_NOTICE_SUP)
#define MAX_MESSAGE BIT(31)		/* IBA 9.7.6 */
#define MAX_READS 16
#define UD_TYPES (BIT(IB_QPT_UD) | BIT(IB_QPT_SMI) | BIT(IB_QPT_GSI))

#define RC BIT(IB_QPT_RC)

/*
 * rdmavt copies so much of a work request; of a UD one it knows how much that is. What is not here is refused when it
 * is posted: all of UC, fast registration, and remote invalidation.
 */
static const struct rvt_operation_params operations[RVT_OPERATION_MAX] = {
	[IB_WR_SEND] = { .length = sizeof(struct ib_send_wr), .qpt_support = UD_TYPES | RC },
	[IB_WR_SEND_WITH_IMM] = { .length = sizeof(struct ib_send_wr), .qpt_support = UD_TYPES | RC },
	[IB_WR_RDMA_WRITE] = { .length = sizeof(struct ib_rdma_wr), .qpt_support = RC },
	[IB_WR_RDMA_WRITE_WITH_IMM] = { .length = sizeof(struct ib_rdma_wr), .qpt_support = RC },
	[IB_WR_RDMA_READ] = {
		.length = sizeof(struct ib_rdma_wr), .qpt_support = RC, .flags = RVT_OPERATION_ATOMIC,
	},
	[IB_WR_ATOMIC_CMP_AND_SWP] = {
		.length = sizeof(struct ib_atomic_wr), .qpt_support = RC,
		.flags = RVT_OPERATION_ATOMIC | RVT_OPERATION_ATOMIC_SGE,
	},
	[IB_WR_ATOMIC_FETCH_AND_ADD] = {
		.length = sizeof(struct ib_atomic_wr), .qpt_support = RC,
		.flags = RVT_OPERATION_ATOMIC | RVT_OPERATION_ATOMIC_SGE,
	},
};

static const enum ib_wc_opcode completions[RVT_OPERATION_MAX] = {
	[IB_WR_SEND] = IB_WC_SEND,
	[IB_WR_SEND_WITH_IMM] = IB_WC_SEND,
	[IB_WR_RDMA_WRITE] = IB_WC_RDMA_WRITE,
	[IB_WR_RDMA_WRITE_WITH_IMM] = IB_WC_RDMA_WRITE,
	[IB_WR_RDMA_READ] = IB_WC_RDMA_READ,
	[IB_WR_ATOMIC_CMP_AND_SWP] = IB_WC_COMP_SWAP,
	[IB_WR_ATOMIC_FETCH_AND_ADD] = IB_WC_FETCH_ADD,
};

static struct softib_hca *to_hca(struct rvt_dev_info *rdi)
{
	return container_of(rdi, struct softib_hca, rdi);
}

/* --- what the kernel asks ---------------------------------------------------- */

static int process_mad(struct ib_device *ibdev, int flags, u32 port_num, const struct ib_wc *wc,
		       const struct ib_grh *grh, const struct ib_mad *in, struct ib_mad *out, size_t *out_size,
		       u16 *out_pkey_index)
{
	struct softib_hca *hca = to_hca(ib_to_rvt(ibdev));
	unsigned long irq;
	int result = IB_MAD_RESULT_SUCCESS;
	bool answers = false;

	*out = *in;
	spin_lock_irqsave(&softib.lock, irq);
	switch (in->mad_hdr.mgmt_class) {
	case IB_MGMT_CLASS_SUBN_DIRECTED_ROUTE:
	case IB_MGMT_CLASS_SUBN_LID_ROUTED:
		/* The subnet manager is a program; what is for it, and answers to it, go on to the agents. */
		if (in->mad_hdr.attr_id == IB_SMP_ATTR_SM_INFO)
			break;
		answers = softib_sma(&hca->port[1], (struct ib_smp *)out, flags & IB_MAD_IGNORE_MKEY);
		/* A request without an answer had a wrong M_Key: nobody else may answer it. */
		if (!answers && (in->mad_hdr.method == IB_MGMT_METHOD_GET || in->mad_hdr.method == IB_MGMT_METHOD_SET))
			result |= IB_MAD_RESULT_CONSUMED;
		break;
	case IB_MGMT_CLASS_PERF_MGMT:
		answers = softib_pma(&hca->node, (struct ib_pma_mad *)out);
		break;
	}
	spin_unlock_irqrestore(&softib.lock, irq);
	*out_size = sizeof(*out);
	return answers ? result | IB_MAD_RESULT_REPLY : result;
}

static int modify_device(struct ib_device *ibdev, int mask, struct ib_device_modify *new)
{
	struct softib_hca *hca = to_hca(ib_to_rvt(ibdev));
	unsigned long flags;

	if (mask & ~IB_DEVICE_MODIFY_NODE_DESC)
		return -EOPNOTSUPP;
	spin_lock_irqsave(&softib.lock, flags);
	memcpy(hca->node.description, new->node_desc, sizeof(hca->node.description));
	memcpy(ibdev->node_desc, new->node_desc, sizeof(ibdev->node_desc));
	spin_unlock_irqrestore(&softib.lock, flags);
	return 0;
}

static const struct attribute_group *no_groups[] = { NULL };

static const struct ib_device_ops operations_of_device = {
	.owner = THIS_MODULE,
	/* Debian's libibverbs opens it by this: the queues that rdmavt shares with user space are QIB's. */
	.driver_id = RDMA_DRIVER_QIB,
	.process_mad = process_mad,
	.port_groups = no_groups,
	.modify_device = modify_device,
	.attach_mcast = softib_attach,
	.detach_mcast = softib_detach,
};

/* --- what rdmavt asks -------------------------------------------------------- */

static int query_port_state(struct rvt_dev_info *rdi, u32 port_num, struct ib_port_attr *props)
{
	struct ib_port_info *info = &to_hca(rdi)->port[1].info;

	props->lid = be16_to_cpu(info->lid);
	props->lmc = info->mkeyprot_resv_lmc & 7;
	props->sm_lid = be16_to_cpu(info->sm_lid);
	props->sm_sl = info->neighbormtu_mastersmsl & 0xF;
	props->state = info->linkspeed_portstate & 0xF;
	props->phys_state = info->portphysstate_linkdown >> 4;
	props->gid_tbl_len = info->guid_cap;
	props->active_width = info->link_width_active;
	props->active_speed = info->linkspeedactive_enabled >> 4;
	props->max_vl_num = info->vlcap_inittype >> 4;
	props->max_mtu = SOFTIB_MTU;
	props->active_mtu = info->neighbormtu_mastersmsl >> 4;
	return 0;
}

static int get_guid_be(struct rvt_dev_info *rdi, struct rvt_ibport *rvp, int index, __be64 *guid)
{
	if (index)
		return -EINVAL;
	*guid = cpu_to_be64(to_hca(rdi)->node.guid + 1);
	return 0;
}

static int shut_down_port(struct rvt_dev_info *rdi, u32 port_num)
{
	unsigned long flags;

	spin_lock_irqsave(&softib.lock, flags);
	softib_link_down(&to_hca(rdi)->port[1], IB_PORT_PHYS_STATE_DISABLED);
	spin_unlock_irqrestore(&softib.lock, flags);
	return 0;
}

static void cap_mask_chg(struct rvt_dev_info *rdi, u32 port_num)
{
	unsigned long flags;

	spin_lock_irqsave(&softib.lock, flags);
	softib_trap(&to_hca(rdi)->node, IB_NOTICE_TRAP_CAP_MASK_CHG);
	spin_unlock_irqrestore(&softib.lock, flags);
}

static struct pci_dev *get_pci_dev(struct rvt_dev_info *rdi)
{
	return &to_hca(rdi)->pci;
}

static void *qp_priv_alloc(struct rvt_dev_info *rdi, struct rvt_qp *qp)
{
	struct softib_qp *priv = kzalloc(sizeof(*priv), GFP_KERNEL);

	if (!priv)
		return ERR_PTR(-ENOMEM);
	priv->qp = qp;
	INIT_WORK(&priv->work, softib_send_work);
	init_waitqueue_head(&priv->idle);
	return priv;
}

static void flush_cq(struct ib_cq *cq)
{
	if (cq)
		flush_work(&ibcq_to_rvtcq(cq)->comptask);
}

static void qp_priv_free(struct rvt_dev_info *rdi, struct rvt_qp *qp)
{
	struct softib_qp *priv = qp->priv;

	cancel_work_sync(&priv->work);
	synchronize_rcu();	/* who found the queue pair in a group is done with it */
	/* What tells of a completion later would queue work of the kernel's own after ib_free_cq has cancelled it. */
	flush_cq(qp->ibqp.send_cq);
	flush_cq(qp->ibqp.recv_cq);
	kfree(priv);
}

static bool schedule_send(struct rvt_qp *qp)
{
	return queue_work(softib.work, &((struct softib_qp *)qp->priv)->work);
}

static void stop_send_queue(struct rvt_qp *qp)
{
	cancel_work_sync(&((struct softib_qp *)qp->priv)->work);
}

static void quiesce_qp(struct rvt_qp *qp)
{
	struct softib_qp *priv = qp->priv;

	wait_event(priv->idle, !(READ_ONCE(qp->s_flags) & RVT_S_BUSY));
}

/* Work that waited in SQD is sent in RTS, and flushed in ERR and SQE. */
static void modify_qp(struct rvt_qp *qp, struct ib_qp_attr *attr, int mask, struct ib_udata *udata)
{
	if (mask & IB_QP_STATE && qp->s_last != qp->s_head)
		schedule_send(qp);
}

static int check_modify_qp(struct rvt_qp *qp, struct ib_qp_attr *attr, int mask, struct ib_udata *udata)
{
	/* There is no automatic path migration. */
	if (mask & IB_QP_ALT_PATH)
		return -EOPNOTSUPP;
	return mask & IB_QP_PATH_MIG_STATE && attr->path_mig_state != IB_MIG_MIGRATED ? -EOPNOTSUPP : 0;
}

static int setup_wqe(struct rvt_qp *qp, struct rvt_swqe *wqe, bool *call_send)
{
	if (qp->ibqp.qp_type != IB_QPT_RC)
		return wqe->length > ib_mtu_enum_to_int(SOFTIB_MTU) ? -EINVAL : 0;
	*call_send = false;	/* it may take long: the work queue sends it */
	return wqe->length > MAX_MESSAGE ? -EINVAL : 0;
}

static void notify_new_ah(struct ib_device *ibdev, struct rdma_ah_attr *attr, struct rvt_ah *ah)
{
	ah->log_pmtu = ilog2(ib_mtu_enum_to_int(SOFTIB_MTU));
}

static int get_pmtu_from_attr(struct rvt_dev_info *rdi, struct rvt_qp *qp, struct ib_qp_attr *attr)
{
	return attr->path_mtu > SOFTIB_MTU ? -EINVAL : (int)attr->path_mtu;
}

static u32 mtu_from_qp(struct rvt_dev_info *rdi, struct rvt_qp *qp, u32 pmtu)
{
	return ib_mtu_enum_to_int(pmtu);
}

static int mtu_to_path_mtu(u32 mtu)
{
	return mtu ? ilog2(mtu) - ilog2(256) + IB_MTU_256 : SOFTIB_MTU;
}

static unsigned int free_all_qps(struct rvt_dev_info *rdi)
{
	return 0;
}

static void nothing(struct rvt_qp *qp)
{
}

/* A queue pair in RESET has no receives (IBA vol 1, 10.3.1); rdmavt leaves them in the ring. The caller has r_lock. */
static void forget_all(struct rvt_qp *qp)
{
	struct softib_qp *priv = qp->priv;

	if (qp->r_rq.wq) {
		RDMA_WRITE_UAPI_ATOMIC(qp->r_rq.wq->head, 0);
		RDMA_WRITE_UAPI_ATOMIC(qp->r_rq.wq->tail, 0);
	} else if (qp->r_rq.kwq) {
		qp->r_rq.kwq->head = 0;
		qp->r_rq.kwq->tail = 0;
	}
	priv->sent = 0;
	priv->exhausted = false;
	priv->write_left = 0;
	priv->has_atomic_result = false;
	priv->has_received = false;
}

static const struct rvt_driver_provided functions = {
	.schedule_send = schedule_send,
	.schedule_send_no_lock = schedule_send,
	.setup_wqe = setup_wqe,
	.do_send = softib_do_send,
	.get_pci_dev = get_pci_dev,
	.qp_priv_alloc = qp_priv_alloc,
	.qp_priv_free = qp_priv_free,
	.free_all_qps = free_all_qps,
	.notify_qp_reset = forget_all,
	.notify_restart_rc = softib_rc_timeout,
	.get_pmtu_from_attr = get_pmtu_from_attr,
	.flush_qp_waiters = nothing,
	.stop_send_queue = stop_send_queue,
	.quiesce_qp = quiesce_qp,
	.notify_error_qp = nothing,
	.check_modify_qp = check_modify_qp,
	.modify_qp = modify_qp,
	.notify_new_ah = notify_new_ah,
	.mtu_from_qp = mtu_from_qp,
	.mtu_to_path_mtu = mtu_to_path_mtu,
	.get_guid_be = get_guid_be,
	.query_port_state = query_port_state,
	.shut_down_port = shut_down_port,
	.cap_mask_chg = cap_mask_chg,
};

/* --- its life ---------------------------------------------------------------- */

static void set_limits(struct rvt_driver_params *params, bool multicast)
{
	struct ib_device_attr *props = &params->props;

	props->sys_image_guid = 0;	/* set with the node's */
	props->device_cap_flags = IB_DEVICE_BAD_PKEY_CNTR | IB_DEVICE_BAD_QKEY_CNTR | IB_DEVICE_SHUTDOWN_PORT |
				  IB_DEVICE_SYS_IMAGE_GUID | IB_DEVICE_RC_RNR_NAK_GEN;
	props->max_mr_size = ~0ULL;
	props->page_size_cap = PAGE_SIZE;
	props->max_qp = 16384;
	props->max_qp_wr = 16384;
	props->max_send_sge = 16;
	props->max_recv_sge = 16;
	props->max_cq = 65536;
	props->max_cqe = 196607;
	props->max_mr = 65536;
	props->max_pd = 65536;
	props->max_ah = 65536;
	props->max_srq = 1024;
	props->max_srq_wr = 16384;
	props->max_srq_sge = 16;
	props->max_qp_rd_atom = MAX_READS;
	props->max_qp_init_rd_atom = MAX_READS;
	props->max_res_rd_atom = props->max_qp * MAX_READS;
	props->atomic_cap = IB_ATOMIC_GLOB;	/* the processor's own */
	props->max_pkeys = SOFTIB_PKEYS;
	props->max_mcast_grp = multicast ? 1024 : 0;
	props->max_mcast_qp_attach = multicast ? 56 : 0;
	props->max_total_mcast_qp_attach = props->max_mcast_grp * props->max_mcast_qp_attach;
	params->max_rdma_atomic = MAX_READS;
	params->lkey_table_size = 16;
	params->qp_table_size = 256;
	params->qpn_start = 1;
	params->qpn_inc = 1;
	params->qpn_res_start = RVT_BITS_PER_PAGE;	/* rdmavt wants some reserved: one */
	params->qpn_res_end = RVT_BITS_PER_PAGE;
	params->nports = 1;
	params->npkeys = SOFTIB_PKEYS;
	params->node = 0;	/* rdmavt indexes by it: NUMA_NO_NODE is none */
	params->psn_mask = SOFTIB_PSN_MASK;
	params->psn_modify_mask = SOFTIB_PSN_MASK;
	params->core_cap_flags = RDMA_CORE_PORT_IBA_IB;
	params->max_mad_size = IB_MGMT_MAD_SIZE;
}

static void free_hca(struct softib_hca *hca)
{
	struct platform_device *platform = hca->platform;

	cancel_delayed_work_sync(&hca->node.trap_work);
	rvt_dealloc_device(&hca->rdi);
	platform_device_unregister(platform);
}

/* The index-th HCA, registered: softib1 is the first. */
struct softib_hca *softib_hca_create(unsigned int index, bool multicast)
{
	struct rvt_dev_info *rdi = rvt_alloc_device(sizeof(struct softib_hca), 1);
	struct softib_hca *hca;
	int error;

	if (!rdi)
		return ERR_PTR(-ENOMEM);
	hca = to_hca(rdi);
	hca->platform = platform_device_register_simple("softib", index, NULL, 0);
	if (IS_ERR(hca->platform)) {
		error = PTR_ERR(hca->platform);
		rvt_dealloc_device(rdi);
		return ERR_PTR(error);
	}
	spin_lock_init(&hca->attach_lock);
	INIT_LIST_HEAD(&hca->attached);
	hca->node.type = RDMA_NODE_IB_CA;
	hca->node.index = index;
	hca->node.ports = 1;
	hca->node.guid = 0x5254000000010000ULL + 16 * index;
	hca->node.port = hca->port;
	snprintf(hca->node.description, sizeof(hca->node.description), "softib%u", index + 1);
	snprintf(hca->name, sizeof(hca->name), "softib%u", index + 1);
	hca->pci.dev.init_name = hca->name;
	softib_trap_init(&hca->node);
	softib_port_init(&hca->port[1], &hca->node, 1);

	hca->rvp.port_cap_flags = CAPABILITIES;
	hca->rvp.gid_prefix = hca->port[1].info.gid_prefix;
	rdi->driver_f = functions;
	rdi->post_parms = operations;
	rdi->wc_opcode = completions;
	set_limits(&rdi->dparms, multicast);
	rdi->dparms.props.sys_image_guid = cpu_to_be64(hca->node.guid);
	rdi->ibdev.node_guid = cpu_to_be64(hca->node.guid);
	rdi->ibdev.phys_port_cnt = 1;
	rdi->ibdev.num_comp_vectors = num_online_cpus();
	rdi->ibdev.dev.parent = &hca->platform->dev;
	memcpy(rdi->ibdev.node_desc, hca->node.description, sizeof(rdi->ibdev.node_desc));
	rvt_set_ibdev_name(rdi, "%s%d", "softib", index + 1);
	ib_set_device_ops(&rdi->ibdev, &operations_of_device);
	rvt_init_port(rdi, &hca->rvp, 0, hca->port[1].pkeys);
	WRITE_ONCE(softib.hca[index], hca);
	error = rvt_register_device(rdi);
	if (error) {
		WRITE_ONCE(softib.hca[index], NULL);
		synchronize_rcu();
		free_hca(hca);
		return ERR_PTR(error);
	}
	/* rdmavt has its own for a driver without. The port is down: nobody is in a group yet. */
	if (!multicast) {
		rdi->ibdev.ops.attach_mcast = NULL;
		rdi->ibdev.ops.detach_mcast = NULL;
	}
	return hca;
}

void softib_hca_destroy(struct softib_hca *hca)
{
	unsigned long flags;

	/* The users of the device leave their groups before the tables go: the SA must still be able to answer them. */
	spin_lock_irqsave(&softib.lock, flags);
	WRITE_ONCE(hca->leaving, true);
	spin_unlock_irqrestore(&softib.lock, flags);
	synchronize_rcu();
	rvt_unregister_device(&hca->rdi);
	WRITE_ONCE(softib.hca[hca->node.index], NULL);
	softib_disconnect(&hca->port[1]);
	synchronize_rcu();
	free_hca(hca);
}
