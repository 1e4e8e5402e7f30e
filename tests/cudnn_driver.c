/* cudnn_driver.c - the driver as far as the real cuDNN needs it to make plans for a device that is not there: it asks
 * to load what it has compiled, and looks up the rest without calling it. A libcuda.so.1 for test_cuda_dnn.
 */
#include <stddef.h>

#define DRIVER __attribute__((visibility("default")))

enum { SUCCESS = 0, STUB_LIBRARY = 34 };

static int code;

DRIVER int cuLibraryLoadData(void **library)
{
    *library = &code;
    return SUCCESS;
}

DRIVER int cuLibraryGetKernel(void **kernel)
{
    *kernel = &code;
    return SUCCESS;
}

DRIVER int cuLibraryUnload(void) { return SUCCESS; }

DRIVER int cuGetErrorString(int error, const char **text)
{
    *text = error ? "there is no driver" : "no error";
    return SUCCESS;
}

#define ABSENT(name)                                                                                                   \
    DRIVER int name(void) { return STUB_LIBRARY; }

ABSENT(cuCtxGetCurrent)
ABSENT(cuCtxGetLimit) ABSENT(cuCtxPopCurrent) ABSENT(cuCtxPushCurrent) ABSENT(cuDeviceGet) ABSENT(cuDeviceGetCount)
    ABSENT(cuDriverGetVersion) ABSENT(cuGetErrorName) ABSENT(cuKernelGetAttribute) ABSENT(cuKernelSetAttribute)
        ABSENT(cuLaunchCooperativeKernel) ABSENT(cuLaunchKernel) ABSENT(cuLaunchKernelEx) ABSENT(cuLibraryLoadFromFile)
            ABSENT(cuLinkAddData) ABSENT(cuLinkComplete) ABSENT(cuLinkCreate) ABSENT(cuLinkDestroy)
                ABSENT(cuOccupancyMaxPotentialClusterSize) ABSENT(cuStreamGetCtx)
