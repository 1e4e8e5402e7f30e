/* attention_mma_decode.cu */
