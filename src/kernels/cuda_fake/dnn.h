/* dnn.h - descriptors of the fake cuDNN: what they were told. */
#ifndef TE_KERNELS_CUDA_FAKE_DNN_H
#define TE_KERNELS_CUDA_FAKE_DNN_H

#include "fake.h"

#include <cudnn.h>

enum { MAX_ATTRIBUTES = 12 };

typedef struct descriptor descriptor;

typedef struct attribute {
    cudnnBackendAttributeName_t name;
    cudnnBackendAttributeType_t type;
    int64_t n;
    void *values;
} attribute;

struct descriptor {
    cudnnBackendDescriptorType_t type;
    attribute attributes[MAX_ATTRIBUTES];
    int n, refs, choice;
    bool final, dropped; /* dropped: by whoever made it; others may hold it still */
};

/* NULL where it was not told. */
const attribute *te_fake_attribute(const descriptor *d, int name);
/* The descriptor that one was given; NULL: none. */
descriptor *te_fake_part(const descriptor *d, int name);

#endif
