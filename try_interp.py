import os, sys, time
os.environ.setdefault("JAX_PLATFORMS","cpu")
import jax, jax.numpy as jnp, numpy as np
sys.path.insert(0,'.')
from tests.support import mgpu_interp_ext as ext
ext.install(); ext.relax_barriers()
from tests.support.interpreter import mosaic_interpreter
from pallas_kernels.attention.mosaic_sm90.forward import forward, ForwardConfig
from pallas_kernels.attention.options import Options
from pallas_kernels.attention.reference import attention as ref
B,S,H,K,D=1,int(sys.argv[1]),2,1,64
rng=np.random.default_rng(0)
q,k,v=(jnp.asarray(rng.normal(size=s),jnp.bfloat16) for s in ((B,S,H,D),(B,S,K,D),(B,S,K,D)))
t=time.time()
with mosaic_interpreter(2) as params:
    out,lse=forward(q,k,v,None,None,None,None,options=Options(D**-0.5),config=ForwardConfig(ctas=1,block_kv=64),interpret=params)
    out.block_until_ready()
print(time.time()-t)
r=ref(q.astype(jnp.float32),k.astype(jnp.float32),v.astype(jnp.float32))
print(np.abs(np.asarray(out,np.float32)-np.asarray(r)).max())
print(np.isnan(np.asarray(out,np.float32)).mean(), np.isnan(np.asarray(lse)).mean(), np.asarray(lse)[0,0,:5], np.asarray(lse)[0,0,64:70])
print(np.isnan(np.asarray(out,np.float32))[0,:,0].any(-1).astype(int))
