/* hand_attention.c - plans of attention. */
#include "hand_internal.h"
