/* Protection domains and memory regions. No state of ours: Python owns both, and says when they are used no more. */
#include "cm.h"

int mcast_alloc_pd(struct mcast_id *id, struct ibv_pd **pd)
{
	if (!id->id || !id->id->verbs)
		return -EINVAL;
	errno = 0;
	*pd = mcast_sym.ibv_alloc_pd(id->id->verbs);
	return *pd ? 0 : mcast_errno_or(ENOMEM);
}

int mcast_dealloc_pd(struct ibv_pd **pd)
{
	int ret = *pd ? mcast_returned(mcast_sym.ibv_dealloc_pd(*pd)) : 0;

	if (!ret)
		*pd = NULL;
	return ret;
}

/* Register by way of ibv_reg_mr_iova2, which leaves out optional access that the kernel or the device cannot do. */
int mcast_register(struct ibv_pd *pd, void *address, uint64_t bytes, int writable, int relaxed, struct ibv_mr **mr)
{
	int access = writable ? IBV_ACCESS_LOCAL_WRITE : 0;

	errno = 0;
	if (relaxed && mcast_sym.ibv_reg_mr_iova2)
		*mr = mcast_sym.ibv_reg_mr_iova2(pd, address, bytes, (uint64_t)(uintptr_t)address,
						 (unsigned int)(access | IBV_ACCESS_RELAXED_ORDERING));
	else
		*mr = (mcast_sym.ibv_reg_mr)(pd, address, bytes, access);
	return *mr ? 0 : mcast_errno_or(ENOMEM);
}

int mcast_has_dmabuf(void)
{
	return mcast_sym.ibv_reg_dmabuf_mr != NULL;
}

int mcast_register_dmabuf(struct ibv_pd *pd, int fd, uint64_t offset, uint64_t bytes, uint64_t iova, int writable,
			  int relaxed, struct ibv_mr **mr)
{
	int access = (writable ? IBV_ACCESS_LOCAL_WRITE : 0) | (relaxed ? IBV_ACCESS_RELAXED_ORDERING : 0);

	if (!mcast_has_dmabuf())
		return -ENOSYS;
	errno = 0;
	*mr = mcast_sym.ibv_reg_dmabuf_mr(pd, offset, bytes, iova, fd, access);
	return *mr ? 0 : mcast_errno_or(EOPNOTSUPP);
}

uint32_t mcast_lkey(struct ibv_mr *mr)
{
	return mr->lkey;
}

int mcast_deregister(struct ibv_mr **mr)
{
	int ret = *mr ? mcast_returned(mcast_sym.ibv_dereg_mr(*mr)) : 0;

	if (!ret)
		*mr = NULL;
	return ret;
}
